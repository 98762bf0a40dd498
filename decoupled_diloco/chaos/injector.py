"""Does to real processes and their links what a schedule of faults says."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from decoupled_diloco.chaos import schedule
from decoupled_diloco.chaos.schedule import Fault
from decoupled_diloco.runtime.launch_options import SYNCER


class Process(Protocol):
  """What is needed of a `subprocess.Popen` that is running."""

  pid: int

  def send_signal(self, sig: int, /) -> None:
    """Sends it a signal."""
    ...


class Links(Protocol):
  """What is needed of `proxy.LinkProxies`."""

  def set_cut(self, learner: int, is_cut: bool) -> None:
    """See there."""
    ...

  def set_bandwidth(self, learner: int, bytes_per_second: float | None) -> None:
    """See there."""
    ...

  def flip_bit(self, learner: int) -> None:
    """See there."""
    ...


class Struck(NamedTuple):
  """A fault that was injected.

  Attributes:
    fault: what was to happen.
    at: when it did, in seconds of Unix time.
    learners: whom it really befell: those that were running then.
    pids: of their processes, or of the syncer's.
  """

  fault: Fault
  at: float
  learners: tuple[int, ...]
  pids: tuple[int, ...]

  @property
  def is_effective(self) -> bool:
    """Whether it befell anybody."""
    return bool(self.pids)


class _Ending(NamedTuple):
  """A fault that lasts, and is over at a time of the injector's clock."""

  at: float
  kind: str
  learner: int
  pid: int


class Injector:
  """Injects faults into a run, whenever it is polled.

  A fault that comes while its learner is dead befalls nobody. Of two that last
  and overlap, the one that ends last ends both.

  Args:
    faults: in the order of their times, which count from `begin`.
    process: the running process of a learner or of the syncer; None if it is
      not running.
    links: of the learners.
    slow_bytes_per_second: bandwidth of a link that is slow.
    tell: is given sentences for people.
    clock: seconds from any start.
    unix_time: seconds of Unix time.

  Attributes:
    struck: what was injected so far.
  """

  def __init__(
    self,
    faults: Iterator[Fault],
    *,
    process: Callable[[int | str], Process | None],
    links: Links,
    slow_bytes_per_second: float,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    unix_time: Callable[[], float] = time.time,
  ):
    self.struck: list[Struck] = []
    self._faults = faults
    self._next: Fault | None = None
    self._process = process
    self._links = links
    self._slow_bytes_per_second = slow_bytes_per_second
    self._tell = tell
    self._clock = clock
    self._unix_time = unix_time
    self._began_at: float | None = None
    self._endings: list[_Ending] = []

  @property
  def has_begun(self) -> bool:
    """Whether faults are injected by now, or were."""
    return self._began_at is not None

  def begin(self) -> None:
    """From now on the times of faults count."""
    self._began_at = self._clock()
    self._next = next(self._faults, None)

  def poll(self) -> None:
    """Injects what is due, and ends what is over."""
    if self._began_at is None:
      return
    now = self._clock()
    for ending in [e for e in self._endings if e.at <= now]:
      self._endings.remove(ending)
      self._end(ending)
    while (
      self._next is not None and self._began_at + self._next.at_seconds <= now
    ):
      self._strike(self._next)
      self._next = next(self._faults, None)

  def finish(self) -> None:
    """Ends everything that lasts; nothing is injected any more."""
    self._next = None
    endings, self._endings = self._endings, []
    for ending in endings:
      self._end(ending)

  def _strike(self, fault: Fault) -> None:
    whom = [SYNCER] if fault.kind == SYNCER else list(fault.learners)
    found = [(m, self._process(m)) for m in whom]
    alive = {m: process for m, process in found if process is not None}
    struck = Struck(
      fault,
      self._unix_time(),
      tuple(m for m in alive if isinstance(m, int)),
      tuple(process.pid for process in alive.values()),
    )
    self.struck.append(struck)
    if not struck.is_effective:
      self._tell(f'{_capital(fault)}: it is dead already')
      return
    self._tell(_capital(fault))
    for m, process in alive.items():
      match fault.kind:
        case schedule.KILL | schedule.SITE | schedule.SYNCER:
          _send(process, signal.SIGKILL)
        case schedule.FREEZE:
          _send(process, signal.SIGSTOP)
        case schedule.PARTITION:
          self._links.set_cut(int(m), True)
        case schedule.SLOW:
          self._links.set_bandwidth(int(m), self._slow_bytes_per_second)
        case schedule.CORRUPT:
          self._links.flip_bit(int(m))
      if fault.seconds:
        until = self._clock() + fault.seconds
        self._endings.append(_Ending(until, fault.kind, int(m), process.pid))

  def _end(self, ending: _Ending) -> None:
    others = [
      e
      for e in self._endings
      if (e.kind, e.learner, e.pid) == (ending.kind, ending.learner, ending.pid)
    ]
    if others:
      return  # One that began later goes on.
    match ending.kind:
      case schedule.FREEZE:
        process = self._process(ending.learner)
        if process is not None and process.pid == ending.pid:
          _send(process, signal.SIGCONT)
      case schedule.PARTITION:
        self._links.set_cut(ending.learner, False)
      case schedule.SLOW:
        self._links.set_bandwidth(ending.learner, None)


def _capital(fault: Fault) -> str:
  text = str(fault)
  return text[0].upper() + text[1:]


def _send(process: Process, number: int) -> None:
  """A process that ends at this moment has no need of the signal."""
  with contextlib.suppress(ProcessLookupError):
    process.send_signal(number)
