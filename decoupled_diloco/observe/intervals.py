"""Which of a learner's tokens live on: a union of half-open intervals."""

import bisect
from collections.abc import Iterable

# How many separate intervals are told apart.
_MOST = 1 << 10

Interval = tuple[int, int]


class Intervals:
  """A growing union of intervals (start, end] of token positions.

  A position is the learner's count of tokens since the run began; whatever is
  added twice counts once. At most 1024 separate intervals are told apart: of
  more, the older half is only counted, and what is added there later is not
  counted again. (A contribution reaches back as far as `max_staleness` allows,
  which is a few intervals.)
  """

  def __init__(self):
    self._sorted: list[Interval] = []  # Disjoint, and not adjacent.
    self._sealed_until = 0
    self._sealed = 0

  def add(self, start: int, end: int) -> None:
    """Covers the positions start+1 to end."""
    start = max(start, self._sealed_until)
    if start >= end:
      return
    # All that touch (start, end]: those that end at or after its start and
    # start at or before its end.
    first = bisect.bisect_left(self._sorted, start, key=lambda i: i[1])
    last = bisect.bisect_right(self._sorted, end, key=lambda i: i[0])
    if first < last:
      start = min(start, self._sorted[first][0])
      end = max(end, self._sorted[last - 1][1])
    self._sorted[first:last] = [(start, end)]
    if len(self._sorted) > _MOST:
      half = self._sorted[: _MOST // 2]
      self._sealed += sum(b - a for a, b in half)
      self._sealed_until = half[-1][1]
      del self._sorted[: len(half)]

  def total(self, others: Iterable[Interval] = ()) -> int:
    """How many positions are covered, by these and by others together."""
    covered = self._sealed
    until = self._sealed_until
    for start, end in sorted([*self._sorted, *others]):
      covered += max(end - max(start, until), 0)
      until = max(until, end)
    return covered
