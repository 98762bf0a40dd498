"""Batches for one learner, addressed by their index, on grain.

The training tokens are cut into windows of `sequence_length + 1` tokens that
start every `sequence_length` tokens: neighbours share one token, the last
target of one and the first input of the next, so every token is a target once.
Each epoch has its own permutation of all windows, the same for all learners,
and shard s of S takes its entries s, s + S, s + 2S, ... The permutation is
computed per entry (grain's index shuffle, a small block cipher), so batch
1,000,000 costs as much as batch 0 and a learner may join anywhere at any time.
In every epoch at most `num_shards * batch_size - 1` windows are left out, other
ones each time, so that all shards have equally many full batches.
"""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32, Integer

from decoupled_diloco.data.corpus import Corpus, TextOptions, open_corpus
from decoupled_diloco.data.indexed import (
  IndexedIterator,
  spread_batches,
  stack_batches,
)

# grain's index shuffle computes in 32 bits.
_MAX_WINDOWS = 2**32 - 1


class TextPipeline:
  """The batches of one shard, at random access.

  Attributes:
    options: what it was made with.
    shard: which shard it reads.
    corpus: the tokens; its tokenizer has the vocabulary's size.
    num_windows: windows of the training text, over all shards.
    batches_per_epoch: batches of this shard (and of every other) per epoch.
    dataset: the same batches as a `grain.MapDataset`, for further
      transformations; endless, as all of these are, when indexed beyond its
      length of one epoch.
  """

  def __init__(
    self, options: TextOptions, shard: int, corpus: Corpus | None = None
  ):
    """Opens the corpus.

    Args:
      options: what to read.
      shard: which part, in [0, num_shards).
      corpus: `open_corpus(options)`, to share it among the learners of one
        process; opened here if not given.

    Raises:
      ValueError: if `shard` is out of range, the corpus cannot be opened, or
        it is too short for one batch per shard.
    """
    if not 0 <= shard < options.num_shards:
      raise ValueError(
        f'shard must lie in [0, num_shards={options.num_shards}), got '
        f'{shard}; raise num_shards to the most learners that may ever join.'
      )
    self.options = options
    self.shard = shard
    self.corpus = open_corpus(options) if corpus is None else corpus
    windows = _windows(self.corpus.train, options.sequence_length)
    self.num_windows = len(windows)
    per_round = options.num_shards * options.batch_size
    self.batches_per_epoch = self.num_windows // per_round
    if not self.batches_per_epoch:
      raise ValueError(
        f'the text must give each of num_shards={options.num_shards} shards '
        f'one batch of batch_size={options.batch_size} windows, {per_round} '
        f'windows of {options.sequence_length + 1} tokens, and its '
        f'{self.corpus.train.size} training tokens make {self.num_windows}; '
        'use more text, or lower num_shards, batch_size or sequence_length.'
      )
    if self.num_windows > _MAX_WINDOWS:
      raise ValueError(
        f'the text must make at most {_MAX_WINDOWS} windows and makes '
        f'{self.num_windows}; raise sequence_length={options.sequence_length}.'
      )

    def gather(indices: Sequence[int]) -> dict[str, np.ndarray]:
      return {'tokens': windows[np.asarray(indices)].astype(np.int32)}

    self.dataset: grain.MapDataset[dict[str, np.ndarray]] = (
      grain.MapDataset.range(self.num_windows)
      .seed(options.seed)
      .shuffle()
      .slice(
        slice(shard, self.batches_per_epoch * per_round, options.num_shards)
      )
      .batch(options.batch_size, drop_remainder=True, batch_fn=gather)
    )
    # The first access sets up grain's statistics, which is not thread-safe;
    # later ones are.
    self.dataset[0]

  def batch(self, index: int) -> dict[str, Int32[np.ndarray, 'batch window']]:
    """Returns batch `index` of the endless run over all epochs.

    Args:
      index: from 0 on; `index // batches_per_epoch` is the epoch.

    Returns:
      {'tokens': int32 [batch_size, sequence_length + 1]}, a copy.

    Raises:
      ValueError: if `index` is negative.
    """
    if index < 0:
      raise ValueError(f'index must not be negative, got {index}; start at 0.')
    batch = self.dataset[index]
    assert batch is not None  # only a grain filter leaves gaps
    return batch

  def scan_batches(
    self, position: int, num_steps: int
  ) -> dict[str, Int32[np.ndarray, 'step batch window']]:
    """Returns batches `position` to `position + num_steps - 1`, stacked.

    Returns:
      {'tokens': int32 [num_steps, batch_size, sequence_length + 1]}: what one
      `lax.scan` of `num_steps` inner steps consumes.

    Raises:
      ValueError: if `position` is negative or `num_steps` is not positive.
    """
    return stack_batches(self, position, num_steps)

  def identity(self) -> dict[str, Any]:
    """What a position depends on, see `IndexedIterator`."""
    options = self.options
    return {
      'corpus_digest': self.corpus.digest,
      'shard': self.shard,
      'num_shards': options.num_shards,
      'batch_size': options.batch_size,
      'sequence_length': options.sequence_length,
      'seed': options.seed,
    }


class TextIterator(IndexedIterator):
  """Iterates over a `TextPipeline`, endlessly, from a position.

  'tokens' is [batch, sequence_length + 1], of a scan [step, batch, ...].
  """


def train_batches(
  options: TextOptions, shard: int, scan_steps: int | None = None
) -> TextIterator:
  """Returns the endless training batches of one shard, from the start.

  Args:
    options: what to read.
    shard: which learner's part, in [0, num_shards).
    scan_steps: see `TextIterator`.

  Raises:
    ValueError: see `TextPipeline`.
  """
  return TextIterator(TextPipeline(options, shard), scan_steps)


def held_out_batches(
  options: TextOptions, num_batches: int, corpus: Corpus | None = None
) -> dict[str, Int32[np.ndarray, 'step batch window']]:
  """Returns the batches for evaluation: the same ones for everybody.

  They are spread evenly over the held-out text, each of them too, and depend
  on neither `seed` nor `num_shards`.

  Args:
    options: what to read.
    num_batches: how many.
    corpus: `open_corpus(options)` if it is open already.

  Returns:
    {'tokens': int32 [num_batches, batch_size, sequence_length + 1]}; no
    window occurs twice.

  Raises:
    ValueError: if the held-out text is too short.
  """
  if num_batches < 1:
    raise ValueError(f'num_batches must be at least 1, got {num_batches}.')
  corpus = open_corpus(options) if corpus is None else corpus
  windows = _windows(corpus.held_out, options.sequence_length)
  needed = num_batches * options.batch_size
  if needed > len(windows):
    raise ValueError(
      f'num_batches={num_batches} of batch_size={options.batch_size} need '
      f'{needed} held-out windows of {options.sequence_length + 1} tokens, and '
      f'the {corpus.held_out.size} held-out tokens make {len(windows)}; use '
      'more text, lower num_batches, or raise held_out_fraction='
      f'{options.held_out_fraction}.'
    )
  indices = spread_batches(len(windows), num_batches, options.batch_size)
  return {'tokens': windows[indices].astype(np.int32)}


def _windows(
  tokens: Integer[np.ndarray, ' token'], sequence_length: int
) -> Integer[np.ndarray, 'index window']:
  """All windows of `tokens`, as a view: no copy is made."""
  if tokens.size <= sequence_length:
    return np.empty((0, sequence_length + 1), tokens.dtype)
  every = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length + 1)
  return every[::sequence_length]
