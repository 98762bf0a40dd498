"""Labelled images in memory: where they come from, and which are held out."""

import dataclasses
import hashlib
import importlib.util
import pathlib
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Float32, Int32, Integer


@dataclasses.dataclass(frozen=True)
class ImageOptions:
  """What images the learners see, and how they are cut up among them.

  Attributes:
    source: 'digits' (1,797 handwritten digits of 8 x 8 grey pixels, in the
      package scikit-learn).
    batch_size: images per batch of one learner.
    num_shards: into how many shards an epoch is cut; the most learners that
      can read without overlap.
    held_out_fraction: share of each class that is never trained on, in [0, 1).
    seed: of the order of the images and of their shifts, in [0, 2**32).
    shift_pixels: each time an image is trained on, it is moved by up to so many
      pixels in both directions, and zeros come in; 0: never.
  """

  source: str = 'digits'
  batch_size: int = 32
  num_shards: int = 8
  held_out_fraction: float = 0.2
  seed: int = 0
  shift_pixels: int = 0

  def __post_init__(self):
    if self.source not in _SOURCES:
      raise ValueError(
        f'source must be one of {", ".join(map(repr, _SOURCES))}, got '
        f'{self.source!r}; other images can be given as arrays, see '
        '`split_images`.'
      )
    for name in ('batch_size', 'num_shards'):
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(
          f'{name} must be a positive integer, got {value!r}; set at least 1.'
        )
    check_held_out_fraction(self.held_out_fraction)
    if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
      raise ValueError(
        f'seed must be an integer in [0, 2**32), got {self.seed!r}; set 0.'
      )
    if not isinstance(self.shift_pixels, int) or self.shift_pixels < 0:
      raise ValueError(
        'shift_pixels must be an integer from 0 on, got '
        f'{self.shift_pixels!r}; 0 leaves the images as they are.'
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
  """All images of a source, read-only.

  Attributes:
    train: float32 [image, height, width, channel], to train on.
    train_labels: int32 [image], from 0 on.
    held_out: images to evaluate on, likewise.
    held_out_labels: their labels.
    num_classes: the largest label of all, plus 1.
    digest: SHA-256 over everything: equal exactly for equal data and split.
  """

  train: Float32[np.ndarray, 'image height width channel']
  train_labels: Int32[np.ndarray, ' image']
  held_out: Float32[np.ndarray, 'image height width channel']
  held_out_labels: Int32[np.ndarray, ' image']
  num_classes: int
  digest: str


def open_images(options: ImageOptions) -> Images:
  """Reads the images that the options name.

  Raises:
    ValueError: if they are not there.
  """
  return split_images(*_SOURCES[options.source](), options.held_out_fraction)


def split_images(
  images: Float[np.ndarray, 'image height width channel'],
  labels: Integer[np.ndarray, ' image'],
  held_out_fraction: float,
) -> Images:
  """Divides images into those to train on and those to evaluate on.

  Of every class the same share is held out, spread evenly over its images in
  their order. (Every fifth of all images would be a bad choice for data that
  goes through the classes in turn.)

  Args:
    images: pixels, scaled as the model shall see them.
    labels: class numbers from 0 on.
    held_out_fraction: in [0, 1).

  Raises:
    ValueError: if the arrays do not fit together.
  """
  check_held_out_fraction(held_out_fraction)
  if images.ndim != 4 or labels.shape != images.shape[:1]:
    raise ValueError(
      'images must be [image, height, width, channel] with one label each, got '
      f'{images.shape} and labels {labels.shape}; add a last axis to grey '
      'images: images[..., None].'
    )
  if not labels.size or labels.min() < 0:
    raise ValueError(
      f'there must be images, and labels from 0 on, got {labels.size} images '
      f'with labels from {min(labels, default=0)}; number the classes 0, 1, ...'
    )
  is_held_out = np.zeros(labels.shape, bool)
  for label in np.unique(labels):
    [of_class] = np.nonzero(labels == label)
    count = int(of_class.size * held_out_fraction)
    is_held_out[of_class[np.arange(count) * of_class.size // max(count, 1)]] = 1
  pixels, numbers = images.astype('<f4'), labels.astype('<i4')
  train = pixels[~is_held_out], numbers[~is_held_out]
  held_out = pixels[is_held_out], numbers[is_held_out]
  digest = hashlib.sha256()
  for array in (*train, *held_out):
    array.flags.writeable = False
    digest.update(repr(array.shape).encode())
    digest.update(array.tobytes())
  num_classes = int(labels.max()) + 1
  return Images(*train, *held_out, num_classes, digest.hexdigest())


def check_held_out_fraction(fraction: float) -> None:
  """Raises ValueError unless the fraction leaves something to train on."""
  if not 0 <= fraction < 1:
    raise ValueError(
      f'held_out_fraction must lie in [0, 1), got {fraction!r}; 0.2 holds out '
      '20 %.'
    )


def _digits() -> tuple[np.ndarray, np.ndarray]:
  # As a file: importing scikit-learn takes seconds and loads SciPy.
  spec = importlib.util.find_spec('sklearn')
  for folder in (spec and spec.submodule_search_locations) or ():
    path = pathlib.Path(folder, 'datasets', 'data', 'digits.csv.gz')
    if path.is_file():
      # 64 pixels from 0 to 16 and the label, a line each.
      table = np.loadtxt(path, np.float32, delimiter=',')
      pixels = table[:, :-1].reshape(-1, 8, 8, 1) / np.float32(16)
      return pixels, table[:, -1].astype(np.int32)
  raise ValueError(
    "source='digits' needs the package scikit-learn, in which these images "
    "lie, and it is not installed; run: pip install 'decoupled_diloco[lab]', "
    'or give the pipeline other images, see `split_images`.'
  )


_SOURCES: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
  'digits': _digits,
}
