"""Figures of a long stream, in bounded memory."""

import statistics

# A power of two, so that thinning out keeps every second, fourth, ... value.
_MOST = 1 << 11


class Series:
  """The last value, the count and the median of a stream of numbers.

  The median is exact for the first 2048 values; after that it is the median of
  every second, fourth, ... value, evenly over the whole stream, so that a run
  of months needs no more memory than one of minutes.

  Attributes:
    last: the last value; None before the first.
    count: how many there were.
  """

  def __init__(self):
    self.last: float | None = None
    self.count = 0
    self._kept: list[float] = []
    self._stride = 1

  def add(self, value: float) -> None:
    """Takes in one value."""
    self.last = value
    if self.count % self._stride == 0:
      self._kept.append(value)
      if len(self._kept) == _MOST:
        self._kept = self._kept[::2]
        self._stride *= 2
    self.count += 1

  @property
  def median(self) -> float | None:
    """The middle value, or the mean of the two middle ones; None if empty."""
    return statistics.median(self._kept) if self._kept else None
