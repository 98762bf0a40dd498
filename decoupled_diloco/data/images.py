"""Batches of labelled images for one learner, addressed by their index.

As for text (see `pipeline`): each epoch has its own permutation of all images,
the same for all learners, and shard s of S takes its entries s, s + S, s + 2S,
... In every epoch at most `num_shards * batch_size - 1` images are left out,
other ones each time, so that all shards have equally many full batches. How an
image is shifted follows from the seed, the epoch and its place therein, so
every batch is the same whenever and wherever it is made.
"""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from decoupled_diloco.data.image_source import (
  ImageOptions,
  Images,
  open_images,
)
from decoupled_diloco.data.indexed import (
  Batch,
  IndexedIterator,
  spread_batches,
  stack_batches,
)


class ImagePipeline:
  """The batches of one shard, at random access.

  Attributes:
    options: what it was made with.
    shard: which shard it reads.
    images: the images.
    batches_per_epoch: batches of this shard (and of every other) per epoch.
    dataset: the same batches as a `grain.MapDataset`, for further
      transformations; endless when indexed beyond its length of one epoch.
  """

  def __init__(
    self, options: ImageOptions, shard: int, images: Images | None = None
  ):
    """Opens the images.

    Args:
      options: what to read.
      shard: which part, in [0, num_shards).
      images: `open_images(options)`, to share them among the learners of one
        process, or others from `split_images`; opened here if not given.

    Raises:
      ValueError: if `shard` is out of range, the images cannot be opened, or
        there are too few for one batch per shard.
    """
    if not 0 <= shard < options.num_shards:
      raise ValueError(
        f'shard must lie in [0, num_shards={options.num_shards}), got '
        f'{shard}; raise num_shards to the most learners that may ever join.'
      )
    self.options = options
    self.shard = shard
    self.images = open_images(options) if images is None else images
    num_images = len(self.images.train)
    per_round = options.num_shards * options.batch_size
    self.batches_per_epoch = num_images // per_round
    if not self.batches_per_epoch:
      raise ValueError(
        f'there must be {per_round} images to train on, for each of '
        f'num_shards={options.num_shards} shards one batch of '
        f'batch_size={options.batch_size}, and there are {num_images}; lower '
        'num_shards, batch_size or held_out_fraction='
        f'{options.held_out_fraction}.'
      )
    order = grain.MapDataset.range(num_images).seed(options.seed).shuffle()
    # Before the slice, where the place of an image in the epoch is that among
    # all shards: no two shards draw the same shifts.
    self.dataset: grain.MapDataset[Batch] = (
      order.random_map(_with_offset(options.shift_pixels))
      .slice(
        slice(shard, self.batches_per_epoch * per_round, options.num_shards)
      )
      .batch(
        options.batch_size,
        drop_remainder=True,
        batch_fn=_gather(self.images, options.shift_pixels),
      )
    )
    # The first access sets up grain's statistics, which is not thread-safe;
    # later ones are.
    self.dataset[0]

  def batch(self, index: int) -> Batch:
    """Returns batch `index` of the endless run over all epochs.

    Args:
      index: from 0 on; `index // batches_per_epoch` is the epoch.

    Returns:
      {'image': float32 [batch_size, height, width, channel], 'label': int32
      [batch_size]}, copies.

    Raises:
      ValueError: if `index` is negative.
    """
    if index < 0:
      raise ValueError(f'index must not be negative, got {index}; start at 0.')
    batch = self.dataset[index]
    assert batch is not None  # only a grain filter leaves gaps
    return batch

  def scan_batches(self, position: int, num_steps: int) -> Batch:
    """Returns batches `position` to `position + num_steps - 1`, stacked.

    Returns:
      {'image': float32 [num_steps, batch_size, height, width, channel],
      'label': int32 [num_steps, batch_size]}.

    Raises:
      ValueError: if `position` is negative or `num_steps` is not positive.
    """
    return stack_batches(self, position, num_steps)

  def identity(self) -> dict[str, Any]:
    """What a position depends on, see `IndexedIterator`."""
    options = self.options
    return {
      'images_digest': self.images.digest,
      'shard': self.shard,
      'num_shards': options.num_shards,
      'batch_size': options.batch_size,
      'seed': options.seed,
      'shift_pixels': options.shift_pixels,
    }


class ImageIterator(IndexedIterator):
  """Iterates over an `ImagePipeline`, endlessly, from a position.

  Of a scan, 'image' is [step, batch, height, width, channel] and 'label'
  [step, batch].
  """


def train_image_batches(
  options: ImageOptions, shard: int, scan_steps: int | None = None
) -> ImageIterator:
  """Returns the endless training batches of one shard, from the start.

  Args:
    options: what to read.
    shard: which learner's part, in [0, num_shards).
    scan_steps: see `IndexedIterator`.

  Raises:
    ValueError: see `ImagePipeline`.
  """
  return ImageIterator(ImagePipeline(options, shard), scan_steps)


def held_out_image_batches(
  options: ImageOptions, num_batches: int, images: Images | None = None
) -> Batch:
  """Returns the batches for evaluation: the same ones for everybody, unshifted.

  They are spread evenly over the held-out images, each of them too, and depend
  on neither `seed` nor `num_shards`.

  Args:
    options: what to read.
    num_batches: how many.
    images: `open_images(options)` if they are open already.

  Returns:
    {'image': float32 [num_batches, batch_size, height, width, channel],
    'label': int32 [num_batches, batch_size]}; no image occurs twice.

  Raises:
    ValueError: if there are too few held-out images.
  """
  if num_batches < 1:
    raise ValueError(
      f'num_batches must be at least 1, got {num_batches}; ask for a batch.'
    )
  images = open_images(options) if images is None else images
  available = len(images.held_out)
  needed = num_batches * options.batch_size
  if needed > available:
    raise ValueError(
      f'num_batches={num_batches} of batch_size={options.batch_size} need '
      f'{needed} held-out images, and there are {available}; lower num_batches '
      f'or raise held_out_fraction={options.held_out_fraction}.'
    )
  indices = spread_batches(available, num_batches, options.batch_size)
  return {
    'image': images.held_out[indices],
    'label': images.held_out_labels[indices],
  }


def _with_offset(most: int):
  """Adds to an image's index where its window begins in the padded image."""

  def draw(index: int, rng: np.random.Generator) -> tuple[int, int, int]:
    top, left = rng.integers(0, 2 * most, 2, endpoint=True) if most else (0, 0)
    return index, top, left

  return draw


def _gather(images: Images, most: int):
  """Cuts a batch out of the images, which have a margin of `most` zeros."""
  padded = np.pad(images.train, ((0, 0), (most, most), (most, most), (0, 0)))
  height, width = images.train.shape[1:3]
  # All positions of the window, as a view: no copy is made.
  windows = np.lib.stride_tricks.sliding_window_view(
    padded, (height, width), axis=(1, 2)
  )

  def gather(elements: Sequence[tuple[int, int, int]]) -> Batch:
    index, top, left = np.array(elements).T
    found = windows[index, top, left]  # [batch, channel, height, width]
    return {
      'image': np.ascontiguousarray(np.moveaxis(found, 1, -1)),
      'label': images.train_labels[index],
    }

  return gather
