"""The synchronous baseline under the same faults, as one would operate it.

When a process dies, all are ended at once and started again from the newest
checkpoint: a step needs all of them. Checkpoints are taken as often as is best
for the rate of failures, in the background, and compiled code is kept.

What would not befall a job within one site is left out, to its advantage: slow
links, flipped bits, a syncer's death. A process that is cut off is treated like
a frozen one: the others wait for it.
"""

import dataclasses
import json
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from decoupled_diloco.chaos import schedule
from decoupled_diloco.chaos.baseline_worker import WorkerFacts
from decoupled_diloco.chaos.injector import Injector
from decoupled_diloco.chaos.options import BaselineOptions
from decoupled_diloco.chaos.result import ChaosResult
from decoupled_diloco.chaos.schedule import Fault, FaultOptions
from decoupled_diloco.run_options import RunOptions
from decoupled_diloco.runtime import processes
from decoupled_diloco.runtime.launch_options import LaunchError

_POLL_SECONDS = 0.02
_MEASURE_SECONDS = 120.0


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


def failure_seconds(options: FaultOptions) -> float:
  """Mean time between drawn faults that end a synchronous job; inf if none."""
  total = sum(options.weights.values())
  fatal = sum(
    options.weights.get(kind, 0.0) for kind in (schedule.KILL, schedule.SITE)
  )
  if not options.mean_seconds_between or not fatal:
    return float('inf')
  return options.mean_seconds_between * total / fatal


@dataclasses.dataclass
class BaselineLog:
  """What happened to a baseline, as it goes on.

  Attributes:
    began_at: when the first step was done; None before.
    step: that training has come to, or will go on from.
    num_processed: steps that were done, those that were lost included.
    generations: how often all processes were started.
    deaths: of processes that ended the job.
    restarts: seconds from each death to the first step after it.
    trained_seconds: with a step at least every so often.
    checkpoint_costs: seconds that a checkpoint took.
    is_done: whether all steps were done.
  """

  began_at: float | None = None
  step: int = 0
  num_processed: int = 0
  generations: int = 0
  deaths: int = 0
  restarts: list[float] = dataclasses.field(default_factory=list)
  trained_seconds: float = 0.0
  checkpoint_costs: list[float] = dataclasses.field(default_factory=list)
  is_done: bool = False


class BaselineRun:
  """A baseline that is run for a given time.

  Args:
    num_workers: M.
    faults: in the order of their times, which count from the first step on.
    wall_seconds: how long it is run from the first step on.
    restart_seconds: pause before everything is started again.
    stall_seconds: how long a step may take before that is done as well.
    start_seconds: how long the first step of a generation may take.
    spawn: starts all workers of a generation, given its number from 0, and
      gives what the first one reports.
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
    num_workers: int,
    faults: Iterator[Fault],
    *,
    wall_seconds: float,
    restart_seconds: float,
    stall_seconds: float,
    start_seconds: float,
    spawn: Callable[[int], tuple[Sequence[Worker], Lines]],
    newest_checkpoint: Callable[[], int],
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
  ):
    self.log = BaselineLog()
    self._num_workers = num_workers
    self._wall_seconds = wall_seconds
    self._restart_seconds = restart_seconds
    self._stall_seconds = stall_seconds
    self._start_seconds = start_seconds
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
        self._sleep(_POLL_SECONDS)
    finally:
      self.injector.finish()
      self._end_all()

  def _is_over(self) -> bool:
    log = self.log
    if log.is_done or self._stopped_by is not None:
      return True
    return (
      log.began_at is not None
      and self._clock() >= log.began_at + self._wall_seconds
    )

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

  def _hear(self, report: dict[str, float], now: float) -> None:
    log = self.log
    if 'seconds' in report:
      log.checkpoint_costs.append(report['seconds'])
    if 'step' not in report:
      return
    if log.began_at is None:
      log.began_at = now
      self.injector.begin()
    if self._last_step_at is None and self._died_at is not None:
      log.restarts.append(now - self._died_at)
    elif self._last_step_at is not None:
      log.trained_seconds += now - self._last_step_at
    self._last_step_at = now
    log.step = int(report['step'])
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
    self._workers, self._reports = self._spawn(self.log.generations)
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


def baseline_run(
  options: RunOptions,
  config: pathlib.Path,
  folder: pathlib.Path,
  faults: Iterator[Fault],
  *,
  fault_options: FaultOptions,
  baseline: BaselineOptions,
  wall_seconds: float,
  tell: Callable[[str], None],
) -> BaselineRun:
  """A baseline of real processes on this machine.

  Args:
    options: of the decoupled run; model, data, optimizer, pace and the number
      of learners are those of the baseline.
    config: the same as a file that `given` has written.
    folder: for checkpoints and logs.
    faults: see `BaselineRun`.
    fault_options: what they were drawn with.
    baseline: see there.
    wall_seconds: see `BaselineRun`.
    tell: is given sentences for people.
  """
  from decoupled_diloco.chaos import checkpoint_file

  num_workers = options.membership.num_learners
  launch = options.launch

  def spawn(generation: int) -> tuple[list[subprocess.Popen], Lines]:
    del generation
    reports = processes.ReportPipe()
    coordinator = f'127.0.0.1:{_free_port()}'
    workers = []
    for m in range(num_workers):
      facts = worker_facts(
        options, config, folder, m, coordinator, baseline, fault_options
      )
      workers.append(
        processes.spawn(
          _command(facts),
          folder / 'logs' / f'worker-{m}.log',
          core=processes.core_of(m) if launch.pin_cores else None,
          report=reports if m == 0 else None,
        )
      )
    return workers, reports

  def newest() -> int:
    return max(checkpoint_file.steps(folder / 'checkpoints'), default=0)

  return BaselineRun(
    num_workers,
    faults,
    wall_seconds=wall_seconds,
    restart_seconds=launch.restart_seconds,
    stall_seconds=baseline.stall_seconds,
    start_seconds=launch.start_seconds,
    spawn=spawn,
    newest_checkpoint=newest,
    tell=tell,
  )


def worker_facts(
  options: RunOptions,
  config: pathlib.Path,
  folder: pathlib.Path,
  process: int,
  coordinator: str,
  baseline: BaselineOptions,
  fault_options: FaultOptions,
) -> WorkerFacts:
  """What a worker is told; `process` -1 is one that only measures."""
  mean = failure_seconds(fault_options)
  return WorkerFacts(
    config=str(config),
    folder=str(folder / 'checkpoints'),
    process=process,
    coordinator=coordinator,
    checkpoint_seconds=baseline.checkpoint_seconds,
    # A day, if nothing ends it.
    failure_seconds=min(mean, 86400.0),
    stall_seconds=baseline.stall_seconds,
    num_steps=options.budget.steps(options.schedule),
  )


def measured_loss(facts: WorkerFacts, log: pathlib.Path) -> float | None:
  """The held-out loss of the newest checkpoint; None if that fails."""
  reports = processes.ReportPipe()
  worker = processes.spawn(_command(facts), log, report=reports)
  try:
    worker.wait(_MEASURE_SECONDS)
    found = [json.loads(line) for line in reports.lines()]
    return found[-1]['loss'] if found else None
  except subprocess.TimeoutExpired:
    return None
  finally:
    processes.send(worker, signal.SIGKILL)
    worker.wait()
    reports.close()


def result_of(
  run: BaselineRun,
  options: RunOptions,
  wall_seconds: float,
  held_out_loss: float | None,
) -> ChaosResult:
  """What a baseline came to.

  Its goodput is the steps that live on, relative to those that undisturbed
  workers would have done in the time, one in `throttle.step_seconds`.

  Raises:
    ValueError: if workers are not paced, for then nobody knows that.
  """
  log, seconds = run.log, options.throttle.step_seconds
  if not seconds:
    raise ValueError(
      'config.run.throttle.step_seconds=0 leaves open how fast undisturbed '
      'workers would be; pace them, for example with 0.2.'
    )
  struck = run.injector.struck
  tokens = options.data.batch_size * options.data.sequence_length
  return ChaosResult(
    is_complete=run.stopped_by is None,
    end_reason=f'{log.step:,} steps',
    held_out_loss=held_out_loss,
    merged_tokens=float(log.step * tokens * options.membership.num_learners),
    wall_seconds=wall_seconds,
    goodput=log.step * seconds / wall_seconds,
    yield_=log.step / log.num_processed if log.num_processed else None,
    participation=None,
    available=None,
    uptime=min(log.trained_seconds / wall_seconds, 1.0),
    faults=dict(Counter(s.fault.kind for s in struck if s.is_effective)),
    faults_in_vain=sum(not s.is_effective for s in struck),
    detect_seconds=_POLL_SECONDS,
    rejoin_seconds=statistics.median(log.restarts) if log.restarts else None,
    crashes=(),
    lives=log.generations,
    refusals={},
    memory_growth={},
    problems=(),
  )


def _command(facts: WorkerFacts) -> list[str]:
  return [
    sys.executable,
    '-m',
    'decoupled_diloco.chaos.baseline_worker',
    json.dumps(dataclasses.asdict(facts)),
  ]


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]
