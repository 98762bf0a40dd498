"""Credit for payload bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.transport.window import CreditWindow
from decoupled_diloco.transport.wire import WireError


def full(window, chunk, now):
  """Sends chunks until there is no room; returns how many."""
  count = 0
  while window.has_room(chunk):
    window.on_sent(chunk, now)
    count += 1
  return count


def test_grows_while_acknowledgements_are_quick():
  window = CreditWindow(chunk_bytes=10, maximum_bytes=100, delay_seconds=1.0)
  # It begins with four chunks.
  assert (window.size, full(window, 10, now=0.0)) == (40, 4)
  # All 40 are acknowledged in time: as many again, then up to the maximum.
  window.on_acknowledged(40, now=0.5)
  assert (window.size, full(window, 10, now=0.5)) == (80, 8)
  window.on_acknowledged(120, now=1.0)
  assert window.size == 100


def test_does_not_grow_when_it_was_not_the_limit():
  window = CreditWindow(chunk_bytes=10, maximum_bytes=100, delay_seconds=1.0)
  window.on_sent(10, now=0.0)
  window.on_acknowledged(10, now=0.1)
  assert window.size == 40


def test_halves_once_per_window_when_they_are_slow():
  window = CreditWindow(chunk_bytes=10, maximum_bytes=100, delay_seconds=1.0)
  full(window, 10, now=0.0)
  # Two late acknowledgements of the same four chunks are one sign, not two.
  window.on_acknowledged(10, now=2.0)
  window.on_acknowledged(20, now=2.5)
  assert window.size == 20
  window.on_acknowledged(40, now=3.0)
  full(window, 10, now=3.0)
  window.on_acknowledged(60, now=9.0)
  # Never less than two chunks: one is sent while another is acknowledged.
  assert window.size == 20


def test_progress_is_known():
  window = CreditWindow(chunk_bytes=10, maximum_bytes=100, delay_seconds=1.0)
  assert window.waiting_since() is None
  window.on_sent(10, now=3.0)
  window.on_sent(10, now=4.0)
  assert window.waiting_since() == 3.0
  window.on_acknowledged(10, now=5.0)
  assert window.waiting_since() == 5.0
  window.on_acknowledged(10, now=6.0)  # Nothing new.
  assert window.waiting_since() == 5.0
  window.on_acknowledged(20, now=7.0)
  assert window.waiting_since() is None


@pytest.mark.parametrize('total', [9, 21])
def test_refuses_impossible_acknowledgements(total):
  window = CreditWindow(chunk_bytes=10, maximum_bytes=100, delay_seconds=1.0)
  window.on_sent(20, now=0.0)
  window.on_acknowledged(10, now=0.0)
  with pytest.raises(WireError, match='must be from 10 to 20'):
    window.on_acknowledged(total, now=0.0)


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 3)), max_size=60))
def test_never_more_on_its_way_than_the_maximum(steps):
  window = CreditWindow(chunk_bytes=10, maximum_bytes=100, delay_seconds=1.0)
  now = 0.0
  for acknowledged, seconds in steps:
    full(window, 10, now)
    assert 20 <= window.size <= 100
    assert window.in_flight <= 100
    now += seconds
    window.on_acknowledged(
      window.acknowledged + min(acknowledged, window.in_flight), now
    )
