"""All processes of the synchronous baseline as one: all of them, or none.

When one dies, the others are ended at once, and all start again from the newest
checkpoint: a step needs each of them. Where a process is only stopped for a
while, the others wait for it, up to a limit.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from decoupled_diloco.chaos import schedule
from decoupled_diloco.chaos.baseline_log import BaselineLog
from decoupled_diloco.chaos.injector import Injector
from decoupled_diloco.chaos.schedule import Fault
from decoupled_diloco.runtime.launch_options import LaunchError

POLL_SECONDS = 0.02


class Worker(Protocol):
  """What is needed of a process: a part of `subprocess.Popen`."""

  pid: int
  returncode: int | None

  def poll(self) -> int | None:
    """Its exit code; None while it runs."""
    ...

  def wait(self) -> int:
    """Waits for its end."""
    ...

  def send_signal(self, sig: int, /) -> None:
    """Sends it a signal."""
    ...


class Lines(Protocol):
  """What is needed of a `processes.ReportPipe`."""

  def lines(self) -> list[str]:
    """What has been reported since the last call."""
    ...

  def close(self) -> None:
    """Lets go of it."""
    ...


class _NoLinks:
  """The links of a job that has none to be disturbed."""

  def set_cut(self, learner: int, is_cut: bool) -> None:
    raise AssertionError('there are no links.')

  def set_bandwidth(self, learner: int, bytes_per_second: float | None) -> None:
    raise AssertionError('there are no links.')

  def flip_bit(self, learner: int) -> None:
    raise AssertionError('there are no links.')


def faults_of_one_site(faults: Iterator[Fault]) -> Iterator[Fault]:
  """What of a schedule's faults befalls a synchronous job."""
  for fault in faults:
    if fault.kind == schedule.PARTITION:
      fault = fault._replace(kind=schedule.FREEZE)
    if fault.kind in (schedule.KILL, schedule.SITE, schedule.FREEZE):
      yield fault


class BaselineRun:
  """A baseline that is run for a given time.

  Args:
    faults: in the order of their times, which count from the first step on.
    wall_seconds: how long it is run from the first step on.
    restart_seconds: pause before everything is started again.
    stall_seconds: how long a step may take before that is done as well.
    start_seconds: how long the first step of a generation may take.
    stop_seconds: how long the last checkpoint may take.
    spawn: starts all workers of a generation, and gives them and what the
      first one reports.
    newest_checkpoint: the step of the newest checkpoint; 0 for none.
    tell: is given sentences for people.
    clock: seconds from any start.
    sleep: waits.

  Attributes:
    log: what has happened.
    injector: what was injected.
  """

  def __init__(
    self,
    faults: Iterator[Fault],
    *,
    wall_seconds: float,
    restart_seconds: float,
    stall_seconds: float,
    start_seconds: float,
    stop_seconds: float,
    spawn: Callable[[], tuple[Sequence[Worker], Lines]],
    newest_checkpoint: Callable[[], int],
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
  ):
    self.log = BaselineLog()
    self._wall_seconds = wall_seconds
    self._restart_seconds = restart_seconds
    self._stall_seconds = stall_seconds
    self._start_seconds = start_seconds
    self._stop_seconds = stop_seconds
    self._spawn = spawn
    self._newest_checkpoint = newest_checkpoint
    self._tell = tell
    self._clock = clock
    self._sleep = sleep
    self._workers: Sequence[Worker] = ()
    self._reports: Lines | None = None
    self._stopped_by: int | None = None
    self._last_step_at: float | None = None  # Of this generation.
    self._started_at = 0.0
    self._died_at: float | None = None
    self.injector = Injector(
      faults_of_one_site(faults),
      process=self._process,
      links=_NoLinks(),
      slow_bytes_per_second=1.0,
      tell=tell,
      clock=clock,
    )

  @property
  def stopped_by(self) -> int | None:
    """The signal that has ended it early; None if none has."""
    return self._stopped_by

  def request_stop(self, number: int) -> None:
    """Ends it soon; may be called from a signal handler."""
    self._stopped_by = number

  def run(self) -> None:
    """Runs it until the time is over, all steps are done, or it is stopped.

    Raises:
      LaunchError: if it does not come to train.
    """
    try:
      self._start()
      while not self._is_over():
        self._poll()
        self._sleep(POLL_SECONDS)
      self._save_last()
    finally:
      self.injector.finish()
      self._end_all()

  def _is_over(self) -> bool:
    log, now = self.log, self._clock()
    if log.is_done:
      log.ended_at = self._last_step_at  # The last checkpoint has followed.
    elif self._stopped_by is not None:
      log.ended_at = now
    elif log.began_at is not None and now >= log.began_at + self._wall_seconds:
      log.ended_at = log.began_at + self._wall_seconds
    return log.ended_at is not None

  def _save_last(self) -> None:
    """Has the first worker save what has been trained."""
    # It may be waiting for one that is frozen.
    self.injector.finish()
    is_training = self._last_step_at is not None and not self.log.is_done
    if not is_training or self._stopped_by is not None:
      return
    first = self._workers[0]
    deadline = self._clock() + self._stop_seconds
    if first.poll() is None:
      first.send_signal(signal.SIGTERM)
    while first.poll() is None and self._clock() < deadline:
      self._sleep(POLL_SECONDS)
    if first.poll() != 0:
      self._tell('the last checkpoint was not taken; the newest one counts')

  def _poll(self) -> None:
    assert self._reports is not None
    now = self._clock()
    for line in self._reports.lines():
      self._hear(json.loads(line), now)
    codes = [worker.poll() for worker in self._workers]
    if all(code == 0 for code in codes):
      self.log.is_done = True
      return
    dead = [m for m, code in enumerate(codes) if code]
    if dead and self.log.began_at is None:
      # No fault has struck yet, and it would do so again.
      raise LaunchError(
        f'worker {dead[0]} of the baseline has ended with {codes[dead[0]]} '
        'before its first step; see its log.'
      )
    if dead:
      self._restart(now, f'worker {dead[0]} is dead')
      return
    since, patience = self._last_step_at, self._stall_seconds
    if since is None:
      since, patience = self._started_at, self._start_seconds
    if now > since + patience:
      if self.log.began_at is None:
        raise LaunchError(
          f'the baseline has not taken a step within {patience:g} s; see the '
          'logs of its workers.'
        )
      self._restart(now, f'no step for {patience:g} s')
      return
    self.injector.poll()

  def _hear(self, report: dict[str, Any], now: float) -> None:
    log = self.log
    match report:
      case {'checkpoint': _, 'seconds': seconds, 'interval': interval}:
        log.checkpoint_costs.append(seconds)
        log.checkpoint_intervals.append(interval)
      case {'start': phases} if log.generations > 1:
        log.starts.append(phases)
      case {'step': step, 'step_seconds': seconds}:
        self._hear_of_step(step, seconds, now)

  def _hear_of_step(self, step: int, seconds: float, now: float) -> None:
    log = self.log
    if log.began_at is None:
      log.began_at = now
      self.injector.begin()
    if self._last_step_at is not None:
      log.trained_seconds += now - self._last_step_at
      log.step_times.append(seconds)
    elif self._died_at is not None:
      log.restarts.append(now - self._died_at)
    self._last_step_at = now
    log.step = step
    log.num_processed += 1

  def _restart(self, now: float, why: str) -> None:
    # Another death before the first step belongs to the same interruption.
    if self._last_step_at is not None or self._died_at is None:
      self._died_at = now
    self.log.deaths += 1
    self._tell(f'{why}; all start again at step {self._newest_checkpoint()}')
    self._end_all()
    self._sleep(self._restart_seconds)
    self.log.step = self._newest_checkpoint()
    self._start()

  def _start(self) -> None:
    self._last_step_at = None
    self._workers, self._reports = self._spawn()
    self._started_at = self._clock()
    self.log.generations += 1

  def _end_all(self) -> None:
    for worker in self._workers:
      if worker.poll() is None:
        worker.send_signal(signal.SIGKILL)
    for worker in self._workers:
      worker.wait()
    if self._reports is not None:
      self._reports.close()

  def _process(self, whom: int | str) -> Worker | None:
    if not isinstance(whom, int) or whom >= len(self._workers):
      return None
    worker = self._workers[whom]
    return worker if worker.poll() is None else None
