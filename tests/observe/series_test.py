"""The running median."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.observe.series import Series


def test_nothing_yet():
  series = Series()
  assert (series.last, series.count, series.median) == (None, 0, None)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_it_is_the_median(values):
  series = Series()
  for value in values:
    series.add(value)
  assert series.last == values[-1]
  assert series.count == len(values)
  assert series.median == statistics.median(values)


def test_a_long_stream_is_thinned_out_evenly():
  # Of 0..99,999, every 64th is kept (100,000 / 2048 = 48.8, next power of 2):
  # 0, 64, ..., 99,968; their median is 49,984, the true one 49,999.5.
  series = Series()
  for value in range(100_000):
    series.add(value)
  assert series.count == 100_000
  assert len(series._kept) < 2048
  assert series.median == 49_984
