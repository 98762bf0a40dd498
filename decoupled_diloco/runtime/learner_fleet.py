"""The learners of a local run: started, watched, killed, started again."""

import dataclasses
import enum
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from decoupled_diloco.runtime import processes
from decoupled_diloco.runtime.launch_options import (
  EXIT_USAGE,
  LaunchError,
  LaunchOptions,
)

# A learner that was asked to end leaves for good.
_LEFT = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)


class End(NamedTuple):
  """How a process has ended.

  Attributes:
    whom: the learner's number, or 'syncer'.
    pid: of the process.
    code: its exit code; -n if signal n has killed it.
  """

  whom: int | str
  pid: int
  code: int


class _Life(enum.Enum):
  """What the launcher thinks of a learner."""

  RUNNING = enum.auto()
  RESTARTING = enum.auto()
  GONE = enum.auto()


@dataclasses.dataclass
class _Learner:
  process: subprocess.Popen
  life: _Life = _Life.RUNNING
  restarts: int = 0
  restart_at: float = 0.0


class LearnerFleet:
  """The learners' processes.

  Args:
    options: see there.
    command: arguments of a learner's process, given its number and whether it
      goes on for one that has died.
    num_learners: M.
    logs: folder of what they print.
    progress: the share of the run that is done.
    tell: is given sentences for people.

  Attributes:
    ends: how each process that has ended did so, in their order.
  """

  def __init__(
    self,
    options: LaunchOptions,
    *,
    command: Callable[[int, bool], Sequence[str]],
    num_learners: int,
    logs: pathlib.Path,
    progress: Callable[[], float],
    tell: Callable[[str], None],
  ):
    self.ends: list[End] = []
    self._options = options
    self._command = command
    self._logs = logs
    self._progress = progress
    self._tell = tell
    self._kills = [
      (whom, share) for whom, share in options.kill if isinstance(whom, int)
    ]
    self._learners: dict[int, _Learner] = {}
    self._num_learners = num_learners

  @property
  def processes(self) -> list[subprocess.Popen]:
    """The last process of every learner, dead or alive."""
    return [learner.process for learner in self._learners.values()]

  def process(self, m: int) -> subprocess.Popen | None:
    """The process of a learner; None if it is not running."""
    learner = self._learners.get(m)
    if learner is None or learner.process.poll() is not None:
      return None
    return learner.process

  def start(self) -> None:
    """Starts all learners."""
    for m in range(self._num_learners):
      self._learners[m] = _Learner(self._spawn(m, is_again=False))

  def watch(self, is_stopping: bool) -> None:
    """Takes note of who has died, and starts those again that may be.

    Args:
      is_stopping: whether the run is about to end; nobody is started then.

    Raises:
      LaunchError: if a learner may not take part, or none is left.
    """
    now = time.monotonic()
    for m, learner in self._learners.items():
      if learner.life is _Life.RESTARTING and is_stopping:
        learner.life = _Life.GONE
      elif learner.life is _Life.RESTARTING and now >= learner.restart_at:
        learner.process = self._spawn(m, is_again=True)
        learner.life = _Life.RUNNING
        self._tell(f'learner {m} starts again')
      elif learner.life is _Life.RUNNING:
        code = learner.process.poll()
        if code is not None:
          self._take_end(m, learner, code, is_stopping)
    are_gone = all(
      learner.life is _Life.GONE for learner in self._learners.values()
    )
    # One that has left in order says that the syncer is about to end the run.
    if (
      not is_stopping
      and are_gone
      and all(learner.process.returncode for learner in self._learners.values())
    ):
      raise LaunchError(
        f'No learner is left, and none may be started again; see {self._logs}.'
      )

  def inject_kills(self) -> None:
    """Kills the learners whose time has come."""
    done = self._progress()
    for fault in list(self._kills):
      m, share = fault
      if done >= share and self._learners[m].process.poll() is None:
        self._kills.remove(fault)
        self._tell(f'killing learner {m} (SIGKILL) at {done:.0%} of the run')
        processes.send(self._learners[m].process, signal.SIGKILL)

  def _log(self, m: int) -> pathlib.Path:
    return self._logs / f'learner-{m}.log'

  def _spawn(self, m: int, *, is_again: bool) -> subprocess.Popen:
    return processes.spawn(
      self._command(m, is_again),
      self._log(m),
      core=processes.core_of(m) if self._options.pin_cores else None,
    )

  def _take_end(
    self, m: int, learner: _Learner, code: int, is_stopping: bool
  ) -> None:
    """Decides what becomes of a learner whose process has ended."""
    learner.life = _Life.GONE
    self.ends.append(End(m, learner.process.pid, code))
    if code in _LEFT or is_stopping:
      return
    log = self._log(m)
    said = processes.last_line(log)
    if code == EXIT_USAGE and not self._progress():
      raise LaunchError(f'learner {m}: {said or f"see {log}."}', EXIT_USAGE)
    if code == EXIT_USAGE:
      # The others do not suffer for it once the run has begun.
      self._tell(f'learner {m} is out: {said or f"see {log}."}')
      return
    how = processes.describe(code)
    if code > 0 and said:
      how += f': {said}'
    if learner.restarts < self._options.max_restarts:
      learner.life = _Life.RESTARTING
      learner.restarts += 1
      learner.restart_at = time.monotonic() + self._options.restart_seconds
      self._tell(f'learner {m} is dead ({how})')
      return
    has_others = any(
      other.life is not _Life.GONE for other in self._learners.values()
    )
    self._tell(
      f'learner {m} has died {learner.restarts + 1} times ({how}; see '
      f'{log})' + ('; the run goes on without it' * has_others)
    )
