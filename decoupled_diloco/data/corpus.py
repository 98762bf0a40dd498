"""A corpus: all documents as two long token arrays, train and held out.

The held-out part is the tail of every document, so it is as varied as the
training part (all plays, all files), and both keep whole passages together.
How much of a document is held out follows from the tokens so far, so that
short documents contribute their share too. No token is in both parts, and
windows are cut from each part separately, so none straddles the two.
"""

import dataclasses
import functools
import hashlib
import io
import json
import math
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Integer

from decoupled_diloco.data import sources, token_cache
from decoupled_diloco.data.tokenizers import Tokenizer, open_tokenizer

# Part of the key of cached tokens: to be raised when the same files and
# options come to give other tokens.
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TextOptions:
  """What text the learners read, and how it is cut up among them.

  Attributes:
    source: 'plays' (Shakespeare, 5 MB, needs the extra `corpus`), 'python'
      (the interpreter's standard library: differs between Python versions), a
      pattern of local files or `gs://bucket/path/*.txt`, or several of these.
    tokenizer: 'bytes', or the path of a Hugging Face tokenizer file (JSON).
    sequence_length: tokens that the model sees per sequence; a window holds
      one more, the last target.
    batch_size: windows per batch of one learner.
    num_shards: into how many shards an epoch is cut; the most learners that
      can read without overlap. Shards of absent learners go unread for that
      epoch, and are dealt out anew in the next.
    held_out_fraction: share of the tokens that is never trained on, in [0, 1).
    seed: of the order of the windows, in [0, 2**32).
    separator: text between documents; with a tokenizer file, for example,
      '<|endoftext|>'.
    cache_dir: local folder for tokens, which are then mapped from disk instead
      of being kept in memory. Worth it for tokenizer files and for large text.
  """

  source: str | tuple[str, ...] = 'plays'
  tokenizer: str = 'bytes'
  sequence_length: int = 128
  batch_size: int = 8
  num_shards: int = 8
  held_out_fraction: float = 0.05
  seed: int = 0
  separator: str = '\n\n'
  cache_dir: str | None = None

  def __post_init__(self):
    if not isinstance(self.source, str):
      # A list, as configuration files hold it, is not hashable.
      object.__setattr__(self, 'source', tuple(self.source))
    if not self.source or not all(self.source):
      raise ValueError(
        "source must name 'plays', 'python' or patterns of files, got "
        f"{self.source!r}; for example 'texts/*.txt'."
      )
    if not self.tokenizer:
      raise ValueError(
        "tokenizer must be 'bytes' or the path of a tokenizer file, got "
        f"{self.tokenizer!r}; set 'bytes'."
      )
    for name in ('sequence_length', 'batch_size', 'num_shards'):
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(
          f'{name} must be a positive integer, got {value!r}; set at least 1.'
        )
    if not 0 <= self.held_out_fraction < 1:
      raise ValueError(
        'held_out_fraction must lie in [0, 1), got '
        f'{self.held_out_fraction!r}; 0.05 holds out 5 %.'
      )
    if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
      raise ValueError(
        f'seed must be an integer in [0, 2**32), got {self.seed!r}; set 0.'
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """All tokens of a source.

  Attributes:
    train: tokens to train on, in the smallest unsigned type that holds the
      vocabulary (little-endian), read-only; documents one after another.
    held_out: tokens to evaluate on, likewise.
    tokenizer: what made the tokens.
    digest: SHA-256 over the tokenizer and all tokens: equal exactly for equal
      corpora, wherever their files lie.
    num_documents: files that were not empty.
  """

  train: Integer[np.ndarray, ' token']
  held_out: Integer[np.ndarray, ' token']
  tokenizer: Tokenizer
  digest: str
  num_documents: int


def open_corpus(options: TextOptions) -> Corpus:
  """Reads the text that the options name, or maps its cached tokens.

  Documents are read one at a time: the memory needed is the tokens (none of
  them with `cache_dir`) plus the largest document.

  Raises:
    ValueError: if the source, the tokenizer or the cache cannot be used.
  """
  tokenizer = open_tokenizer(options.tokenizer)
  source = options.source
  files = sources.find_files((source,) if isinstance(source, str) else source)
  dtype = _smallest_dtype(tokenizer.vocab_size)
  write = functools.partial(
    _write_tokens, (file.read() for file in files), tokenizer, dtype, options
  )
  if options.cache_dir is None:
    buffers = io.BytesIO(), io.BytesIO()
    summary = write(*buffers)
    train, held_out = (np.frombuffer(b.getbuffer(), dtype) for b in buffers)
  else:
    train, held_out, summary = token_cache.open_or_build(
      options.cache_dir, _cache_key(files, tokenizer, options), dtype, write
    )
  for tokens in (train, held_out):
    tokens.flags.writeable = False
  return Corpus(train, held_out, tokenizer, **summary)


def _write_tokens(
  documents: Iterable[bytes],
  tokenizer: Tokenizer,
  dtype: np.dtype,
  options: TextOptions,
  train_file: BinaryIO,
  held_out_file: BinaryIO,
) -> dict[str, Any]:
  """Writes both parts; returns the digest and the number of documents."""
  separator = tokenizer.encode(options.separator).astype(dtype)
  files = train_file, held_out_file
  hashes = hashlib.sha256(), hashlib.sha256()
  num_documents = num_tokens = num_held_out = 0
  for document in documents:
    tokens = tokenizer.encode(document).astype(dtype, copy=False)
    if not tokens.size:
      continue
    num_documents += 1
    num_tokens += tokens.size
    total_held_out = math.floor(num_tokens * options.held_out_fraction)
    split = tokens.size - (total_held_out - num_held_out)
    num_held_out += tokens.size - split
    parts = tokens[:split], tokens[split:]
    for file, digest, part in zip(files, hashes, parts, strict=True):
      if part.size:
        for array in (part, separator):
          raw = array.tobytes()
          file.write(raw)
          digest.update(raw)
  joint = hashlib.sha256(tokenizer.digest.encode())
  for digest in hashes:
    joint.update(digest.digest())
  return {'digest': joint.hexdigest(), 'num_documents': num_documents}


def _smallest_dtype(vocab_size: int) -> np.dtype:
  for dtype in ('u1', '<u2'):
    if vocab_size - 1 <= np.iinfo(dtype).max:
      return np.dtype(dtype)
  return np.dtype('<u4')


def _cache_key(
  files: list[sources.SourceFile], tokenizer: Tokenizer, options: TextOptions
) -> str:
  described = [(str(f.path), f.size_bytes, f.modified) for f in files]
  depends_on = [
    _FORMAT,
    described,
    tokenizer.digest,
    options.held_out_fraction,
    options.separator,
  ]
  return hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()
