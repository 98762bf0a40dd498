"""How much memory the processes of a run take, and whether that grows."""

import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Growth(NamedTuple):
  """The memory of a process that has lived through the second half of a run.

  Attributes:
    before, after: resident bytes at the beginning and at the end of it; each is
      the median over a tenth of that time.
  """

  before: float
  after: float

  @property
  def share(self) -> float:
    """By how much it has grown, relative to before."""
    return self.after / self.before - 1.0


class _Sample(NamedTuple):
  at: float
  pid: int
  num_bytes: int


def resident_bytes(pid: int) -> int | None:
  """What a process holds in memory; None if that cannot be known (macOS)."""
  try:
    text = pathlib.Path(f'/proc/{pid}/status').read_text()
  except OSError:
    return None
  for line in text.splitlines():
    if line.startswith('VmRSS:'):
      return 1024 * int(line.split()[1])
  return None


class MemoryWatch:
  """Samples the memory of processes now and then.

  Args:
    pids: the running processes, by learner or 'syncer'.
    every_seconds: between two samples.
    measure: resident bytes of a process; None if that is not known.
  """

  def __init__(
    self,
    pids: Callable[[], Mapping[int | str, int]],
    every_seconds: float = 1.0,
    measure: Callable[[int], int | None] = resident_bytes,
  ):
    self._pids = pids
    self._every_seconds = every_seconds
    self._measure = measure
    self._samples: dict[int | str, list[_Sample]] = {}
    self._last_at = -every_seconds

  def poll(self, now: float) -> None:
    """Takes samples if it is time for them; `now` in seconds from any start."""
    if now < self._last_at + self._every_seconds:
      return
    self._last_at = now
    for whom, pid in self._pids().items():
      num_bytes = self._measure(pid)
      if num_bytes is not None:
        sample = _Sample(now, pid, num_bytes)
        self._samples.setdefault(whom, []).append(sample)

  def growth(self, begin: float, end: float) -> dict[int | str, Growth]:
    """Of each process that was there in the whole second half of this time.

    One that was started in the second quarter is left out: it is still warming
    up.
    """
    quarter, tenth = (end - begin) / 4, (end - begin) / 20
    middle = begin + 2 * quarter
    found = {}
    for whom, samples in self._samples.items():
      late = [s for s in samples if middle - quarter <= s.at <= end]
      first = [s.num_bytes for s in late if middle <= s.at <= middle + tenth]
      last = [s.num_bytes for s in late if s.at >= end - tenth]
      if first and last and len({s.pid for s in late}) == 1:
        found[whom] = Growth(statistics.median(first), statistics.median(last))
    return found
