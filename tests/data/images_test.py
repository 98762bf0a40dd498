import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.data.image_source import (
  ImageOptions,
  Images,
  open_images,
  split_images,
)
from decoupled_diloco.data.images import (
  ImageIterator,
  ImagePipeline,
  held_out_image_batches,
  train_image_batches,
)
from decoupled_diloco.data.prefetch import Prefetcher

needs_digits = pytest.mark.skipif(
  importlib.util.find_spec('sklearn') is None,
  reason='scikit-learn, in which the digits lie, is not installed',
)

# 103 images, 4 shards of batches of 5: 103 // (4 * 5) = 5 batches per shard and
# epoch use 100 images and leave out 3.
OPTIONS = ImageOptions(batch_size=5, num_shards=4, seed=7)
NUM_IMAGES = 103
# Recorded with grain 0.2.18; no formula to derive them from.
GOLDEN_FIRST = [19, 64, 32, 84, 55]
GOLDEN_SHIFTS = [[-1, 1], [1, 0], [1, 0], [-1, -1], [-1, -1]]


def _images(num_images=NUM_IMAGES, size=4, digest='images'):
  """Images of one pixel, elsewhere zero: the number of the image, plus one."""
  train = np.zeros((num_images, size, size, 1), np.float32)
  train[:, 1, 1, 0] = np.arange(1, num_images + 1)
  labels = (np.arange(num_images) % 10).astype(np.int32)
  return Images(train, labels, -train, labels, 10, digest)


def _pipeline(shard=0, options=OPTIONS, **kwargs):
  return ImagePipeline(options, shard, _images(**kwargs))


def _numbers(batch):
  """Which images they are, wherever their pixel has been moved to."""
  return (batch['image'].max(axis=(-3, -2, -1)) - 1).astype(int).ravel()


def _places(batch):
  """By how much the pixel has been moved down and to the right."""
  height, width = batch['image'].shape[-3:-1]
  flat = batch['image'].reshape(-1, height * width).argmax(axis=1)
  return np.stack([flat // width - 1, flat % width - 1], axis=1)


def _epoch(pipeline, epoch):
  start = epoch * pipeline.batches_per_epoch
  return [
    number
    for index in range(start, start + pipeline.batches_per_epoch)
    for number in _numbers(pipeline.batch(index)).tolist()
  ]


def _varied(**changes):
  return dataclasses.replace(OPTIONS, **changes)


def test_batches_hold_images_with_their_labels():
  batch = _pipeline().batch(0)
  assert {name: (x.dtype, x.shape) for name, x in batch.items()} == {
    'image': (np.float32, (5, 4, 4, 1)),
    'label': (np.int32, (5,)),
  }
  np.testing.assert_array_equal(batch['label'], _numbers(batch) % 10)
  np.testing.assert_array_equal(_places(batch), np.zeros((5, 2)))


@given(
  num_images=st.integers(1, 60),
  batch_size=st.integers(1, 4),
  num_shards=st.integers(1, 5),
  seed=st.integers(0, 2**32 - 1),
  epoch=st.integers(0, 10**6),
)
def test_shards_cover_an_epoch_without_overlap(
  num_images, batch_size, num_shards, seed, epoch
):
  options = ImageOptions(
    batch_size=batch_size, num_shards=num_shards, seed=seed
  )
  images = _images(num_images)
  per_round = batch_size * num_shards
  if num_images < per_round:
    with pytest.raises(ValueError, match='one batch of'):
      ImagePipeline(options, 0, images)
    return
  numbers = []
  for shard in range(num_shards):
    numbers += _epoch(ImagePipeline(options, shard, images), epoch)
  assert len(numbers) == num_images - num_images % per_round
  assert len(set(numbers)) == len(numbers)
  assert set(numbers) <= set(range(num_images))


def test_epochs_and_seeds_are_shuffled_differently():
  one, other = _pipeline(), _pipeline(options=_varied(seed=8))
  orders = [
    tuple(_epoch(pipeline, epoch))
    for pipeline in (one, other)
    for epoch in range(3)
  ]
  assert len(set(orders)) == 6
  assert list(orders[0]) != sorted(orders[0])


def test_shifts_move_images_and_zeros_come_in():
  options = _varied(shift_pixels=1, batch_size=25, num_shards=1)
  pipeline = _pipeline(options=options)
  batches = [pipeline.batch(index) for index in range(40)]
  places = np.concatenate([_places(batch) for batch in batches])
  # All nine are equally likely, so that 1000 images give 111 of each, with a
  # standard deviation of 10.
  found, counts = np.unique(places, axis=0, return_counts=True)
  assert found.tolist() == [[y, x] for y in (-1, 0, 1) for x in (-1, 0, 1)]
  assert counts.min() > 60
  assert counts.max() < 160
  for batch in batches:
    np.testing.assert_array_equal(batch['label'], _numbers(batch) % 10)
    # The pixel is never lost, and nothing else comes in.
    assert np.all(np.count_nonzero(batch['image'], axis=(1, 2, 3)) == 1)


def test_shifts_do_not_change_which_images_come():
  plain, shifted = _pipeline(), _pipeline(options=_varied(shift_pixels=1))
  for epoch in range(2):
    assert _epoch(plain, epoch) == _epoch(shifted, epoch)


def test_shifts_differ_between_epochs_and_shards_and_follow_the_seed():
  options = _varied(shift_pixels=2)

  def places(shard, first, options=options):
    pipeline = _pipeline(shard, options)
    batches = [pipeline.batch(first + index) for index in range(5)]
    return tuple(map(tuple, np.concatenate(list(map(_places, batches)))))

  others = [(0, 0), (0, 5), (1, 0), (3, 10)]
  assert len({places(shard, first) for shard, first in others}) == 4
  assert places(0, 0) == places(0, 0)
  assert places(0, 0) != places(0, 0, _varied(shift_pixels=2, seed=8))


def test_the_order_is_the_same_in_every_process_and_version():
  # See the test of the same name of the text pipeline.
  batch = _pipeline(3, _varied(shift_pixels=1)).batch(123)
  assert _numbers(batch).tolist() == GOLDEN_FIRST
  assert _places(batch).tolist() == GOLDEN_SHIFTS


@needs_digits
def test_another_process_reads_the_same_digits():
  program = (
    'import hashlib\n'
    'from decoupled_diloco.data import ImageOptions, train_image_batches\n'
    'options = ImageOptions(seed=3, shift_pixels=1)\n'
    'batches = train_image_batches(options, 5, scan_steps=4)\n'
    'print(hashlib.sha256(next(batches)["image"].tobytes()).hexdigest())\n'
  )
  output = subprocess.run(
    [sys.executable, '-c', program],
    env={**os.environ, 'PYTHONHASHSEED': '12345'},
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  options = ImageOptions(seed=3, shift_pixels=1)
  here = next(train_image_batches(options, 5, scan_steps=4))
  assert output.strip() == hashlib.sha256(here['image'].tobytes()).hexdigest()


def test_a_scan_is_its_batches():
  pipeline = _pipeline(1, _varied(shift_pixels=1))
  scan = pipeline.scan_batches(3, 4)  # over the end of epoch 0 (5 batches)
  assert scan['image'].shape == (4, 5, 4, 4, 1)
  assert scan['label'].shape == (4, 5)
  for step in range(4):
    batch = pipeline.batch(3 + step)
    for name in ('image', 'label'):
      np.testing.assert_array_equal(scan[name][step], batch[name])


def test_a_batch_is_a_copy():
  pipeline = _pipeline()
  pipeline.batch(0)['image'][:] = -1
  assert pipeline.batch(0)['image'].min() >= 0


@pytest.mark.parametrize('scan_steps', [None, 4])
def test_restore_is_exact(scan_steps):
  options = _varied(shift_pixels=1)
  original = ImageIterator(_pipeline(2, options), scan_steps)
  for _ in range(7):
    next(original)
  state = json.loads(json.dumps(original.get_state()))
  assert state['position'] == 7 * (scan_steps or 1)
  restored = ImageIterator(_pipeline(2, options), scan_steps)
  restored.set_state(state)
  for _ in range(8):
    expected, batch = next(original), next(restored)
    for name in ('image', 'label'):
      np.testing.assert_array_equal(batch[name], expected[name])


def test_restore_through_a_prefetcher_is_exact():
  options = _varied(shift_pixels=1)
  with Prefetcher(ImageIterator(_pipeline(0, options), 2), depth=3) as original:
    for _ in range(4):
      next(original)
    state = original.get_state()
    expected = next(original)
  assert state['position'] == 8
  iterator = ImageIterator(_pipeline(0, options), 2)
  # A position alone is enough, where all else is known to be the same.
  iterator.position = state['position']
  with Prefetcher(iterator, depth=3) as restored:
    np.testing.assert_array_equal(next(restored)['image'], expected['image'])


@pytest.mark.parametrize(
  ('other', 'message'),
  [
    (_pipeline(1), 'shard was 0 and is 1'),
    (
      _pipeline(digest='changed'),
      "images_digest was 'images' and is 'changed'",
    ),
    *(
      (
        _pipeline(options=_varied(**{name: 2})),
        f'{name} was {getattr(OPTIONS, name)} and is 2',
      )
      for name in ('batch_size', 'num_shards', 'seed', 'shift_pixels')
    ),
  ],
)
def test_a_position_in_something_else_is_refused(other, message):
  state = ImageIterator(_pipeline()).get_state()
  iterator = ImageIterator(other)
  next(iterator)
  with pytest.raises(ValueError, match=f'{message}.*start the data anew'):
    iterator.set_state({**state, 'position': 4})
  assert iterator.position == 1


@pytest.mark.parametrize('position', [-1, 1.0, '1', None])
def test_an_impossible_position_is_refused(position):
  iterator = ImageIterator(_pipeline())
  with pytest.raises(ValueError, match='position must be an integer from 0'):
    iterator.set_state({**iterator.get_state(), 'position': position})


def test_a_foreign_state_is_refused():
  with pytest.raises(ValueError, match=r"fields \['batch_size'.* \['step'\]"):
    ImageIterator(_pipeline()).set_state({'step': 3})


def test_too_few_images_are_explained():
  with pytest.raises(
    ValueError,
    match=r'20 images to train on, .* num_shards=4 .* batch_size=5, and there '
    r'are 19; lower',
  ):
    _pipeline(num_images=19)
  assert _pipeline(num_images=20).batches_per_epoch == 1


@pytest.mark.parametrize('shard', [-1, 4])
def test_shard_out_of_range_is_refused(shard):
  with pytest.raises(
    ValueError, match=rf'\[0, num_shards=4\), got {shard}; raise num_shards'
  ):
    _pipeline(shard)


def test_indices_out_of_range_are_refused():
  with pytest.raises(ValueError, match='index must not be negative'):
    _pipeline().batch(-1)
  with pytest.raises(ValueError, match='num_steps must be at least 1'):
    _pipeline().scan_batches(0, 0)
  with pytest.raises(ValueError, match='scan_steps must be at least 1'):
    ImageIterator(_pipeline(), 0)


def test_held_out_batches_are_spread_and_the_same_for_all():
  images = _images(100)
  batches = held_out_image_batches(OPTIONS, 4, images)
  assert batches['image'].shape == (4, 5, 4, 4, 1)
  # 20 of 100 images: every fifth, dealt to the 4 batches in turn.
  numbers = -batches['image'].min(axis=(2, 3, 4)) - 1
  np.testing.assert_array_equal(numbers[0], [0, 20, 40, 60, 80])
  np.testing.assert_array_equal(numbers[3], [15, 35, 55, 75, 95])
  np.testing.assert_array_equal(batches['label'], numbers % 10)
  others = _varied(seed=1, num_shards=2, shift_pixels=1)
  np.testing.assert_array_equal(
    held_out_image_batches(others, 4, images)['image'], batches['image']
  )


def test_too_few_held_out_images_are_explained():
  with pytest.raises(
    ValueError,
    match=r'num_batches=5 of batch_size=5 need 25 held-out images, and there '
    r'are 24; lower num_batches',
  ):
    held_out_image_batches(OPTIONS, 5, _images(24))
  with pytest.raises(ValueError, match='num_batches must be at least 1'):
    held_out_image_batches(OPTIONS, 0, _images())


def test_the_same_share_of_every_class_is_held_out():
  # 10 images of class 0, then 5 of class 1; of both, 0.4 is held out: 4 of 10
  # at 0, 10/4, 20/4, 30/4 rounded down, and 2 of 5 at 0 and 5/2.
  labels = np.array([0] * 10 + [1] * 5)
  pixels = np.arange(15, dtype=np.float32)[:, None, None, None]
  images = split_images(pixels, labels, 0.4)
  assert images.held_out.ravel().tolist() == [0, 2, 5, 7, 10, 12]
  assert images.held_out_labels.tolist() == [0, 0, 0, 0, 1, 1]
  assert images.train.ravel().tolist() == [1, 3, 4, 6, 8, 9, 11, 13, 14]
  assert images.num_classes == 2
  assert images.train.dtype == np.float32
  assert images.train_labels.dtype == np.int32
  assert split_images(pixels, labels, 0.0).held_out.size == 0


def test_the_digest_is_that_of_data_and_split():
  labels = np.arange(20) % 2
  pixels = np.random.default_rng(0).random((20, 2, 2, 1))
  changed = pixels.copy()
  changed[3] = 0
  digests = [
    split_images(*arguments).digest
    for arguments in (
      (pixels, labels, 0.2),
      (changed, labels, 0.2),
      (pixels, 1 - labels, 0.2),
      (pixels, labels, 0.5),
      (pixels.reshape(20, 4, 1, 1), labels, 0.2),
    )
  ]
  assert len(set(digests)) == 5
  assert split_images(pixels.copy(), labels, 0.2).digest == digests[0]


@pytest.mark.parametrize(
  ('images', 'labels', 'fraction', 'message'),
  [
    (np.zeros((3, 2, 2)), np.zeros(3, int), 0.2, r'images\[\.\.\., None\]'),
    (np.zeros((3, 2, 2, 1)), np.zeros(2, int), 0.2, r'labels \(2,\)'),
    (np.zeros((0, 2, 2, 1)), np.zeros(0, int), 0.2, 'got 0 images'),
    (np.zeros((1, 2, 2, 1)), np.array([-1]), 0.2, 'labels from -1'),
    (np.zeros((1, 2, 2, 1)), np.array([0]), 1.0, r'in \[0, 1\), got 1\.0'),
  ],
)
def test_images_are_checked(images, labels, fraction, message):
  with pytest.raises(ValueError, match=message):
    split_images(images, labels, fraction)


@needs_digits
def test_digits():
  images = open_images(ImageOptions())
  assert len(images.train) + len(images.held_out) == 1797
  assert images.train.shape[1:] == (8, 8, 1)
  assert (images.train.min(), images.train.max()) == (0.0, 1.0)
  assert images.num_classes == 10
  # There are 174 to 183 of each digit, of which a fifth is 34 to 36.
  assert set(np.bincount(images.held_out_labels)) <= {34, 35, 36}
  # A zero is dark in its middle, and bright left and right of it.
  zero = images.train[images.train_labels == 0].mean(axis=0)[..., 0]
  assert zero[4, 4] < 0.1 < 0.5 < min(zero[4, 2], zero[4, 5])
  # Each image is in one of both parts only.
  train = {image.tobytes() for image in images.train}
  assert not any(image.tobytes() in train for image in images.held_out)


def test_missing_digits_are_explained(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r'run: pip install .*\[lab\]'):
    open_images(ImageOptions())


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'source': 'cats'}, "one of 'digits', got 'cats'; .* `split_images`"),
    ({'batch_size': 0}, 'batch_size must be a positive integer, got 0'),
    ({'num_shards': 1.5}, 'num_shards must be a positive integer, got 1.5'),
    ({'held_out_fraction': 1.0}, r'\[0, 1\), got 1.0; 0.2 holds out 20 %'),
    ({'seed': -1}, 'seed must be an integer'),
    ({'shift_pixels': -1}, 'shift_pixels must be an integer from 0 on'),
  ],
)
def test_options_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    _varied(**changes)
