"""The union of intervals."""

from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.observe.intervals import Intervals

PAIRS = st.tuples(st.integers(0, 60), st.integers(0, 60))


@given(st.lists(PAIRS), st.lists(PAIRS, max_size=4))
def test_every_position_counts_once(pairs, others):
  intervals = Intervals()
  covered = set()
  for start, end in pairs:
    intervals.add(start, end)
    covered |= set(range(start + 1, end + 1))
  assert intervals.total() == len(covered)
  # They stay sorted, disjoint and apart, so that they are as few as can be.
  flat = [bound for pair in intervals._sorted for bound in pair]
  assert flat == sorted(set(flat))
  for start, end in others:
    covered |= set(range(start + 1, end + 1))
  assert intervals.total(others) == len(covered)


def test_many_gaps_take_bounded_memory():
  # (0, 1], (2, 3], ...: 5000 intervals of one position, none adjacent.
  intervals = Intervals()
  for number in range(5000):
    intervals.add(2 * number, 2 * number + 1)
  assert intervals.total() == 5000
  assert len(intervals._sorted) <= 1024
  # What was sealed is not counted again, what is new is.
  intervals.add(0, 3)
  intervals.add(9_998, 10_010)
  assert intervals.total() == 5000 - 1 + 12
