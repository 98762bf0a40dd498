import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.data.corpus import Corpus, TextOptions
from decoupled_diloco.data.pipeline import (
  TextIterator,
  TextPipeline,
  held_out_batches,
  train_batches,
)
from decoupled_diloco.data.prefetch import Prefetcher
from decoupled_diloco.data.tokenizers import ByteTokenizer

# 203 windows of 3 + 1 tokens, 4 shards of batches of 5: 203 // (4 * 5) = 10
# batches per shard and epoch use 200 windows and leave out 3.
OPTIONS = TextOptions(sequence_length=3, batch_size=5, num_shards=4, seed=7)
NUM_WINDOWS = 203
# Recorded with grain 0.2.18; no formula to derive them from.
GOLDEN_FIRST = [170, 167, 10, 122, 201]
GOLDEN_LATER = [126, 152, 48, 36, 95]


def _corpus(num_windows=NUM_WINDOWS, sequence_length=3, digest='corpus'):
  """Tokens that count up, so that a window tells which one it is."""
  train = np.arange(num_windows * sequence_length + 1, dtype=np.uint16)
  held_out = np.arange(50_000, 50_000 + train.size, dtype=np.uint16)
  return Corpus(train, held_out, ByteTokenizer(), digest, 1)


def _pipeline(shard=0, options=OPTIONS, **kwargs):
  corpus = _corpus(sequence_length=options.sequence_length, **kwargs)
  return TextPipeline(options, shard, corpus)


def _window_numbers(batch):
  return (batch['tokens'][..., 0] // OPTIONS.sequence_length).ravel().tolist()


def _epoch(pipeline, epoch):
  start = epoch * pipeline.batches_per_epoch
  return [
    number
    for index in range(start, start + pipeline.batches_per_epoch)
    for number in _window_numbers(pipeline.batch(index))
  ]


def test_batches_hold_windows():
  batch = _pipeline().batch(0)
  assert batch.keys() == {'tokens'}
  assert batch['tokens'].dtype == np.int32
  assert batch['tokens'].shape == (5, 4)
  # Each window counts up from a multiple of 3.
  np.testing.assert_array_equal(
    batch['tokens'] - batch['tokens'][:, :1], [[0, 1, 2, 3]] * 5
  )
  assert not np.any(batch['tokens'][:, 0] % 3)


def test_every_token_but_the_first_is_a_target_once():
  options = dataclasses.replace(OPTIONS, batch_size=1, num_shards=1)
  pipeline = TextPipeline(options, 0, _corpus())
  targets = [
    target
    for index in range(pipeline.batches_per_epoch)
    for target in pipeline.batch(index)['tokens'][0, 1:].tolist()
  ]
  # 203 windows of 3 targets; batches of one leave out no window.
  assert sorted(targets) == list(range(1, 203 * 3 + 1))


def test_shards_cover_an_epoch_without_overlap():
  shards = [_pipeline(shard) for shard in range(4)]
  assert shards[0].batches_per_epoch == 10
  for epoch in range(3):
    numbers = [number for shard in shards for number in _epoch(shard, epoch)]
    assert len(numbers) == len(set(numbers)) == 200


@given(
  num_windows=st.integers(1, 60),
  batch_size=st.integers(1, 4),
  num_shards=st.integers(1, 5),
  seed=st.integers(0, 2**32 - 1),
  epoch=st.integers(0, 10**6),
)
def test_partition(num_windows, batch_size, num_shards, seed, epoch):
  options = TextOptions(
    sequence_length=3, batch_size=batch_size, num_shards=num_shards, seed=seed
  )
  corpus = _corpus(num_windows)
  per_round = batch_size * num_shards
  if num_windows < per_round:
    with pytest.raises(ValueError, match='one batch of'):
      TextPipeline(options, 0, corpus)
    return
  numbers = []
  for shard in range(num_shards):
    numbers += _epoch(TextPipeline(options, shard, corpus), epoch)
  assert len(numbers) == num_windows - num_windows % per_round
  assert len(set(numbers)) == len(numbers)
  assert set(numbers) <= set(range(num_windows))


def test_the_left_out_windows_differ_between_epochs():
  shards = [_pipeline(shard) for shard in range(4)]
  left_out = [
    frozenset(range(NUM_WINDOWS)).difference(
      *(_epoch(shard, epoch) for shard in shards)
    )
    for epoch in range(3)
  ]
  assert [len(numbers) for numbers in left_out] == [3, 3, 3]
  assert len(set(left_out)) == 3


def test_epochs_and_seeds_are_shuffled_differently():
  pipeline = _pipeline()
  other = _pipeline(options=dataclasses.replace(OPTIONS, seed=8))
  # With seed + epoch as the key, seed 8 would begin with epoch 1 of seed 7.
  orders = [
    _epoch(source, epoch)
    for source, epoch in itertools.product((pipeline, other), range(3))
  ]
  for first, second in itertools.combinations(orders, 2):
    assert first != second
  assert orders[0] != sorted(orders[0])


def test_a_late_joiner_reads_what_it_would_have_read():
  early = _pipeline(3)
  for index in range(57):
    early.batch(index)
  late = _pipeline(3)
  np.testing.assert_array_equal(
    late.batch(57)['tokens'], early.batch(57)['tokens']
  )
  # Batch 57 is in epoch 5, which the others read without it.
  others = {n for shard in range(3) for n in _epoch(_pipeline(shard), 5)}
  assert others.isdisjoint(_window_numbers(late.batch(57)))


def test_the_order_is_the_same_in_every_process_and_version():
  # Were it to change (with a new version of grain, say), a restored position
  # would mean other text, and learners of both versions would overlap.
  assert _window_numbers(_pipeline().batch(0)) == GOLDEN_FIRST
  assert _window_numbers(_pipeline(3).batch(123)) == GOLDEN_LATER


def test_another_process_reads_the_same_plays():
  program = (
    'import hashlib\n'
    'from decoupled_diloco.data import TextOptions, train_batches\n'
    'batches = train_batches(TextOptions(seed=3), 5, scan_steps=4)\n'
    'print(hashlib.sha256(next(batches)["tokens"].tobytes()).hexdigest())\n'
  )
  output = subprocess.run(
    [sys.executable, '-c', program],
    env={**os.environ, 'PYTHONHASHSEED': '12345'},
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  here = next(train_batches(TextOptions(seed=3), 5, scan_steps=4))
  assert output.strip() == hashlib.sha256(here['tokens'].tobytes()).hexdigest()


def test_a_scan_is_its_batches():
  pipeline = _pipeline(1)
  scan = pipeline.scan_batches(8, 4)  # over the end of epoch 0 (10 batches)
  assert scan['tokens'].shape == (4, 5, 4)
  for step in range(4):
    np.testing.assert_array_equal(
      scan['tokens'][step], pipeline.batch(8 + step)['tokens']
    )


def test_a_batch_is_a_copy():
  pipeline = _pipeline()
  pipeline.batch(0)['tokens'][:] = -1
  assert pipeline.batch(0)['tokens'].min() >= 0


@pytest.mark.parametrize('scan_steps', [None, 4])
def test_restore_is_exact(scan_steps):
  original = TextIterator(_pipeline(2), scan_steps)
  for _ in range(7):
    next(original)
  state = json.loads(json.dumps(original.get_state()))
  assert state['position'] == 7 * (scan_steps or 1)
  restored = TextIterator(_pipeline(2), scan_steps)
  restored.set_state(state)
  for _ in range(8):
    np.testing.assert_array_equal(
      next(restored)['tokens'], next(original)['tokens']
    )


def test_scans_of_another_length_continue_where_batches_ended():
  original = TextIterator(_pipeline())
  for _ in range(3):
    next(original)
  restored = TextIterator(_pipeline(), scan_steps=2)
  restored.set_state(original.get_state())
  np.testing.assert_array_equal(
    next(restored)['tokens'],
    np.stack([next(original)['tokens'] for _ in range(2)]),
  )


def test_restore_through_a_prefetcher_is_exact():
  with Prefetcher(TextIterator(_pipeline(), 2), depth=3) as original:
    for _ in range(4):
      next(original)
    state = original.get_state()
    expected = next(original)
  assert state['position'] == 8
  with Prefetcher(TextIterator(_pipeline(), 2), depth=3) as restored:
    restored.set_state(state)
    np.testing.assert_array_equal(next(restored)['tokens'], expected['tokens'])


@pytest.mark.parametrize(
  ('other', 'message'),
  [
    (_pipeline(1), 'shard was 0 and is 1'),
    (
      _pipeline(digest='changed'),
      "corpus_digest was 'corpus' and is 'changed'",
    ),
    *(
      (
        _pipeline(options=dataclasses.replace(OPTIONS, **{name: 2})),
        f'{name} was {getattr(OPTIONS, name)} and is 2',
      )
      for name in ('sequence_length', 'batch_size', 'num_shards', 'seed')
    ),
  ],
)
def test_a_position_in_something_else_is_refused(other, message):
  state = TextIterator(_pipeline()).get_state()
  iterator = TextIterator(other)
  next(iterator)
  with pytest.raises(ValueError, match=f'{message}.*start the data anew'):
    iterator.set_state({**state, 'position': 4})
  assert iterator.position == 1


@pytest.mark.parametrize('position', [-1, 1.0, '1', None])
def test_an_impossible_position_is_refused(position):
  iterator = TextIterator(_pipeline())
  with pytest.raises(ValueError, match='position must be an integer from 0'):
    iterator.set_state({**iterator.get_state(), 'position': position})


def test_a_foreign_state_is_refused():
  with pytest.raises(ValueError, match=r"fields \['batch_size'.* \['step'\]"):
    TextIterator(_pipeline()).set_state({'step': 3})


def test_too_little_text_is_explained():
  with pytest.raises(
    ValueError,
    # 4 shards of one batch of 5 need 20 windows; 19 * 3 + 1 tokens make 19.
    match=r'num_shards=4 .* batch_size=5 windows, 20 windows of 4 tokens, '
    r'and its 58 training tokens make 19; use more text, or lower',
  ):
    _pipeline(num_windows=19)
  assert _pipeline(num_windows=20).batches_per_epoch == 1


def test_no_text_at_all_is_explained(tmp_path):
  (tmp_path / 'empty.txt').touch()
  options = TextOptions(source=str(tmp_path / '*.txt'))
  with pytest.raises(ValueError, match='0 training tokens make 0'):
    TextPipeline(options, 0)
  with pytest.raises(ValueError, match='0 held-out tokens make 0'):
    held_out_batches(options, 1)


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
    TextIterator(_pipeline(), 0)


def test_held_out_batches_are_spread_and_the_same_for_all():
  corpus = _corpus(100)
  tokens = held_out_batches(OPTIONS, 4, corpus)['tokens']
  assert tokens.dtype == np.int32
  assert tokens.shape == (4, 5, 4)
  # 20 of 100 windows: every fifth, dealt to the 4 batches in turn.
  numbers = (tokens[..., 0] - 50_000) // 3
  np.testing.assert_array_equal(numbers[0], [0, 20, 40, 60, 80])
  np.testing.assert_array_equal(numbers[3], [15, 35, 55, 75, 95])
  others = dataclasses.replace(OPTIONS, seed=1, num_shards=2)
  np.testing.assert_array_equal(
    held_out_batches(others, 4, corpus)['tokens'], tokens
  )


def test_held_out_text_is_never_trained_on(tmp_path):
  # 10 % of 1000 tokens: 'h' is only in the tail, and 't' only before it.
  (tmp_path / 'a.txt').write_bytes(b't' * 900 + b'h' * 100)
  options = TextOptions(
    source=str(tmp_path / 'a.txt'),
    sequence_length=9,
    batch_size=2,
    num_shards=1,
    held_out_fraction=0.1,
    separator='',
  )
  pipeline = TextPipeline(options, 0)
  for index in range(2 * pipeline.batches_per_epoch):
    assert set(pipeline.batch(index)['tokens'].ravel()) == {ord('t')}
  # (100 - 1) // 9 = 11 windows: 5 batches of 2.
  assert set(held_out_batches(options, 5)['tokens'].ravel()) == {ord('h')}


def test_too_few_held_out_windows_are_explained():
  with pytest.raises(
    ValueError,
    match=r'num_batches=5 of batch_size=5 need 25 held-out windows of 4 '
    r'tokens, and the 73 held-out tokens make 24; use more text, lower num',
  ):
    held_out_batches(OPTIONS, 5, _corpus(24))
  with pytest.raises(ValueError, match='num_batches must be at least 1'):
    held_out_batches(OPTIONS, 0, _corpus())
