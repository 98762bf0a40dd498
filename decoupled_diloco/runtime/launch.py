"""A whole run on one machine: start, watch and restart its processes.

`Launcher` starts one syncer and M learners as processes of their own, restarts
learners that die, injects the kills that were asked for, and leaves no process
behind, however it ends itself.
"""

import contextlib
import dataclasses
import enum
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

# The exit code with which a process says that starting it again cannot help: a
# bad configuration, or a rejection.
EXIT_USAGE = 2

# Becomes the process that is wanted, after it has made sure that it ends with
# its parent, and has pinned itself to a core before jax counts them. This could
# be a preexec_fn if forking were safe in a process with threads, such as jax's.
_BOOTSTRAP = """
import os, sys
parent, core, *command = sys.argv[1:]
if sys.platform == 'linux':
  import ctypes, signal
  PR_SET_PDEATHSIG = 1
  ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
  if os.getppid() != int(parent):
    sys.exit('the launcher has ended')
if core:
  os.sched_setaffinity(0, {int(core)})
os.execvp(command[0], command)
"""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
  """How a local run treats its processes.

  Attributes:
    pin_cores: whether each learner stays on a core of its own (in turn). It
      raises the throughput of several learners on few cores a lot.
    restart_seconds: pause before a dead learner is started again.
    max_restarts: of one learner; after that the run goes on without it.
    start_seconds: how long the syncer may take to listen.
    stop_seconds: how long a process may take to leave when it should.
    kill: faults to inject, as ((learner, share of the run), ...): each learner
      is killed with SIGKILL when that share of the rounds is done.
  """

  pin_cores: bool = True
  restart_seconds: float = 1.0
  max_restarts: int = 3
  start_seconds: float = 120.0
  stop_seconds: float = 10.0
  kill: tuple[tuple[int, float], ...] = ()

  def __post_init__(self):
    object.__setattr__(
      self, 'kill', tuple((int(m), float(at)) for m, at in self.kill)
    )
    for name in ('restart_seconds', 'max_restarts'):
      if getattr(self, name) < 0:
        raise ValueError(f'{name}={getattr(self, name)} must not be negative.')
    for name in ('start_seconds', 'stop_seconds'):
      if getattr(self, name) <= 0:
        raise ValueError(f'{name}={getattr(self, name)} must be positive.')
    for learner, share in self.kill:
      if not 0 < share < 1:
        raise ValueError(
          f'kill=(({learner}, {share}),): the share of the run must be between '
          '0 and 1.'
        )


class LaunchError(RuntimeError):
  """The run cannot go on; the message says why and where to look.

  Attributes:
    exit_code: `EXIT_USAGE` if a process could not begin as it was asked to.
  """

  def __init__(self, message: str, exit_code: int = 1):
    super().__init__(message)
    self.exit_code = exit_code


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


class Launcher:
  """The processes of a local run.

  Args:
    options: see there.
    command: arguments of a process, given its role and the learner's number
      (-1 for the syncer) and the syncer's address ('' for the syncer).
    num_learners: M.
    workdir: where logs go, and where the syncer leaves its address in the file
      `address`.
    progress: the share of the run that is done.
    tell: is given sentences for people.
  """

  def __init__(
    self,
    options: LaunchOptions,
    *,
    command: Callable[[str, int, str], Sequence[str]],
    num_learners: int,
    workdir: pathlib.Path,
    progress: Callable[[], float],
    tell: Callable[[str], None],
  ):
    self._options = options
    self._command = command
    self._num_learners = num_learners
    self._workdir = workdir
    self._progress = progress
    self._tell = tell
    self._syncer: subprocess.Popen | None = None
    self._learners: dict[int, _Learner] = {}
    self._kills = list(options.kill)
    self._address = ''
    self._is_stopping = False

  def run(self, on_poll: Callable[[], None], poll_seconds: float = 0.1) -> None:
    """Starts everything and returns when the run has ended well.

    Args:
      on_poll: called all the time from this thread.
      poll_seconds: how often.

    Raises:
      LaunchError: if the syncer dies, or a learner may not take part.
    """
    try:
      self._start(on_poll, poll_seconds)
      while self._syncer is not None and self._syncer.poll() is None:
        on_poll()
        self._watch_learners()
        self._inject_kills()
        time.sleep(poll_seconds)
      on_poll()
      self._check_syncer()
      self._wait_for_learners(on_poll, poll_seconds)
    finally:
      self._end_all()

  def request_stop(self, number: int = signal.SIGTERM) -> None:
    """Asks the syncer to drain and end; may be called from a signal handler.

    Args:
      number: the signal that it is to get.
    """
    self._is_stopping = True
    if self._syncer is not None:
      _signal(self._syncer, number)

  def kill_all(self) -> None:
    """Ends everything at once."""
    for process in self._processes():
      _signal(process, signal.SIGKILL)

  def _start(self, on_poll: Callable[[], None], poll_seconds: float) -> None:
    address_file = self._workdir / 'address'
    address_file.unlink(missing_ok=True)
    self._syncer = self._spawn('syncer', -1)
    deadline = time.monotonic() + self._options.start_seconds
    while not address_file.exists():
      if self._syncer.poll() is not None:
        self._check_syncer()
        raise LaunchError('The syncer left before it listened.')
      if time.monotonic() > deadline:
        raise LaunchError(
          f'The syncer has not listened within start_seconds='
          f'{self._options.start_seconds:g}; see {self._log("syncer", -1)}.'
        )
      on_poll()
      time.sleep(poll_seconds)
    self._address = address_file.read_text().strip()
    for learner in range(self._num_learners):
      self._learners[learner] = _Learner(self._spawn('learner', learner))

  def _log(self, role: str, learner: int) -> pathlib.Path:
    name = role if learner < 0 else f'{role}-{learner}'
    return self._workdir / 'logs' / f'{name}.log'

  def _spawn(self, role: str, learner: int) -> subprocess.Popen:
    path = self._log(role, learner)
    path.parent.mkdir(parents=True, exist_ok=True)
    core = ''
    # Where the system can pin processes (not on macOS).
    if learner >= 0 and self._options.pin_cores and _has_affinity():
      cores = sorted(os.sched_getaffinity(0))
      core = str(cores[learner % len(cores)])
    bootstrap = [sys.executable, '-ISc', _BOOTSTRAP, str(os.getpid()), core]
    with path.open('ab') as log:
      return subprocess.Popen(
        [*bootstrap, *self._command(role, learner, self._address)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # A Ctrl-C is for the launcher, which then ends the run in order.
        start_new_session=True,
      )

  def _watch_learners(self) -> None:
    now = time.monotonic()
    for m, learner in self._learners.items():
      if learner.life is _Life.RESTARTING and now >= learner.restart_at:
        learner.process = self._spawn('learner', m)
        learner.life = _Life.RUNNING
        self._tell(f'learner {m} starts again')
        continue
      code = learner.process.poll()
      if learner.life is not _Life.RUNNING or code is None:
        continue
      if code == 0:
        learner.life = _Life.GONE
      elif code == EXIT_USAGE and not self._progress():
        raise LaunchError(
          f'learner {m}: {_last_line(self._log("learner", m))}', EXIT_USAGE
        )
      elif code == EXIT_USAGE:
        # The others do not suffer for it once the run has begun.
        learner.life = _Life.GONE
        self._tell(f'learner {m} is out: {_last_line(self._log("learner", m))}')
      elif learner.restarts >= self._options.max_restarts:
        learner.life = _Life.GONE
        self._tell(
          f'learner {m} has died {learner.restarts + 1} times; the run goes on '
          f'without it (see {self._log("learner", m)})'
        )
      else:
        learner.life = _Life.RESTARTING
        learner.restarts += 1
        learner.restart_at = now + self._options.restart_seconds
        self._tell(f'learner {m} is dead ({_describe(code)})')
    learners = self._learners.values()
    are_gone = all(learner.life is _Life.GONE for learner in learners)
    # One that has left in order says that the syncer is about to end the run.
    if are_gone and all(learner.process.returncode for learner in learners):
      raise LaunchError(
        'No learner is left, and none may be started again; see '
        f'{self._workdir / "logs"}.'
      )

  def _inject_kills(self) -> None:
    done = self._progress()
    for fault in list(self._kills):
      m, share = fault
      if done >= share and self._learners[m].process.poll() is None:
        self._kills.remove(fault)
        self._tell(f'killing learner {m} (SIGKILL) at {done:.0%} of the run')
        _signal(self._learners[m].process, signal.SIGKILL)

  def _check_syncer(self) -> None:
    assert self._syncer is not None
    code = self._syncer.returncode
    if code == EXIT_USAGE:
      raise LaunchError(_last_line(self._log('syncer', -1)), EXIT_USAGE)
    if code:
      log = self._log('syncer', -1)
      raise LaunchError(
        f'The syncer has ended ({_describe(code)}): {_last_line(log)}'
      )

  def _wait_for_learners(
    self, on_poll: Callable[[], None], poll_seconds: float
  ) -> None:
    deadline = time.monotonic() + self._patience
    while time.monotonic() < deadline and any(
      learner.process.poll() is None for learner in self._learners.values()
    ):
      on_poll()
      time.sleep(poll_seconds)

  @property
  def _patience(self) -> float:
    """How long processes may take to leave: less if somebody waits for it."""
    seconds = self._options.stop_seconds
    return seconds / 5 if self._is_stopping else seconds

  def _processes(self) -> list[subprocess.Popen]:
    processes = [learner.process for learner in self._learners.values()]
    if self._syncer is not None:
      processes.append(self._syncer)
    return processes

  def _end_all(self) -> None:
    for process in self._processes():
      _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + self._patience
    for process in self._processes():
      try:
        process.wait(max(deadline - time.monotonic(), 0.0))
      except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        process.wait()


def _has_affinity() -> bool:
  return hasattr(os, 'sched_setaffinity')


def _signal(process: subprocess.Popen, number: int) -> None:
  if process.poll() is None:
    with contextlib.suppress(ProcessLookupError):
      process.send_signal(number)


def _describe(code: int) -> str:
  if code < 0:
    return f'killed by {signal.Signals(-code).name}'
  return f'exit code {code}'


def _last_line(log: pathlib.Path) -> str:
  lines = log.read_text(errors='replace').strip().splitlines()
  return lines[-1].removeprefix('error: ') if lines else f'see {log}.'
