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
import math
import pathlib
import signal
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from decoupled_diloco.chaos import baseline_crew, checkpoint_file, schedule
from decoupled_diloco.chaos.baseline_run import POLL_SECONDS, BaselineRun
from decoupled_diloco.chaos.baseline_worker import WorkerFacts
from decoupled_diloco.chaos.options import BaselineOptions
from decoupled_diloco.chaos.result import ChaosResult
from decoupled_diloco.chaos.schedule import FaultOptions
from decoupled_diloco.run_options import RunOptions
from decoupled_diloco.runtime import processes

_MEASURE_SECONDS = 120.0
_DAY_SECONDS = 86400.0
_KILLS = (schedule.KILL, schedule.SITE)
_STOPS = (schedule.FREEZE, schedule.PARTITION)


@dataclasses.dataclass(frozen=True)
class BaselineResult:
  """What a baseline came to.

  Attributes:
    steps: that live on. The first one, whose end begins the clock, counts.
    processed_steps: that were done, those that were lost included.
    tokens_per_step: of all workers together.
    wall_seconds: from the end of the first step on.
    trained_seconds: of these, those in which steps were taken.
    step_seconds: what a step takes undisturbed: what it is paced to, else the
      median of those that were taken; None if there is none.
    is_done: whether all steps were done before the time was over.
    stopped_by: the signal that has ended it early; None if none has.
    generations: how often all processes were started.
    faults: how many befell somebody, by kind.
    faults_in_vain: how many came when their worker was dead already.
    restart_seconds: median time from a death to the next step; None if none
      has died.
    restart_phases: what starts took, by phase, in seconds; medians.
    checkpoint_seconds: time between two checkpoints, the median; None if there
      was none.
    checkpoint_cost_seconds: median time until one was durable.
    held_out_loss: of the last checkpoint; None if it was not measured.
  """

  steps: int
  processed_steps: int
  tokens_per_step: int
  wall_seconds: float
  trained_seconds: float
  step_seconds: float | None
  is_done: bool
  stopped_by: int | None
  generations: int
  faults: Mapping[str, int]
  faults_in_vain: int
  restart_seconds: float | None
  restart_phases: Mapping[str, float]
  checkpoint_seconds: float | None
  checkpoint_cost_seconds: float | None
  held_out_loss: float | None

  @property
  def goodput(self) -> float | None:
    """Tokens that live on, relative to those of undisturbed workers.

    These take a step in `step_seconds`; None if that is not known.
    """
    if self.step_seconds is None or not self.wall_seconds:
      return None
    return self.steps * self.step_seconds / self.wall_seconds


def run_baseline(
  options: RunOptions,
  config: pathlib.Path,
  folder: pathlib.Path,
  *,
  faults: FaultOptions,
  baseline: BaselineOptions,
  wall_seconds: float,
  tell: Callable[[str], None],
  on_stop: Callable[[Callable[[int], None]], None] = lambda request: None,
) -> BaselineResult:
  """Runs a baseline of real processes on this machine, until its time is over.

  It ends earlier when all steps of the budget are done, or it is stopped. No
  process of it is left then.

  Args:
    options: of the decoupled run; model, data, optimizer, pace and the number
      of learners are those of the baseline.
    config: the same as a file that `given` has written.
    folder: for checkpoints and logs.
    faults: what strikes, in seconds since the end of the first step.
    baseline: see there.
    wall_seconds: how long it is run from the end of the first step on.
    tell: is given sentences for people.
    on_stop: is given, before it begins, a function of a signal's number that
      ends it early; that may be called from a signal handler.

  Raises:
    LaunchError: if it does not come to train.
    OSError: if a log cannot be written.
  """
  num_workers = options.membership.num_learners
  checkpoints = folder / 'checkpoints'
  facts = WorkerFacts(
    config=str(config),
    folder=str(checkpoints),
    process=-1,
    checkpoint_seconds=baseline.checkpoint_seconds,
    failure_seconds=min(
      failure_seconds(faults, baseline.stall_seconds, wall_seconds),
      _DAY_SECONDS,
    ),
    stall_seconds=baseline.stall_seconds,
    num_steps=options.budget.steps(options.schedule),
  )

  def spawn() -> tuple[list[subprocess.Popen], processes.ReportPipe]:
    crew = baseline_crew.start(
      num_workers,
      facts,
      folder / 'logs',
      pins_cores=options.launch.pin_cores,
    )
    return crew.workers, crew.reports

  run = BaselineRun(
    schedule.faults(faults, num_workers),
    wall_seconds=wall_seconds,
    restart_seconds=options.launch.restart_seconds,
    stall_seconds=baseline.stall_seconds,
    start_seconds=options.launch.start_seconds,
    stop_seconds=options.launch.stop_seconds,
    spawn=spawn,
    newest_checkpoint=lambda: max(
      checkpoint_file.steps(checkpoints), default=0
    ),
    tell=tell,
  )
  on_stop(run.request_stop)
  run.run()
  loss = None
  if run.stopped_by is None:
    log = folder / 'logs' / 'measure.log'
    loss = _measured_loss(facts, log)
    if loss is None and options.evaluation.batches:
      tell(f'the held-out loss could not be measured; see {log}')
  return result_of(run, options, loss)


def failure_seconds(
  options: FaultOptions, stall_seconds: float, wall_seconds: float
) -> float:
  """Mean time between faults that end a synchronous job; inf if there is none.

  Those are kills, and what stops a process for longer than `stall_seconds`.

  Args:
    options: of the faults, those of its schedule included.
    stall_seconds: see `BaselineOptions`.
    wall_seconds: how long the job is run.
  """
  rate = 0.0
  if options.mean_seconds_between:
    fatal = sum(
      weight * _fatal_share(kind, options, stall_seconds)
      for kind, weight in options.weights.items()
    )
    total = sum(options.weights.values())
    rate = fatal / total / options.mean_seconds_between
  for at_seconds, kind, _, seconds in options.schedule:
    is_fatal = kind in _KILLS or (kind in _STOPS and seconds > stall_seconds)
    if is_fatal and at_seconds <= wall_seconds:
      rate += 1.0 / wall_seconds
  return 1.0 / rate if rate else float('inf')


def _fatal_share(
  kind: str, options: FaultOptions, stall_seconds: float
) -> float:
  """The share of drawn faults of a kind that end a job."""
  mean = options.mean_seconds.get(kind, 0.0)
  if kind in _STOPS and mean:
    # They last for an exponentially distributed time.
    return math.exp(-stall_seconds / mean)
  return float(kind in _KILLS)


def result_of(
  run: BaselineRun, options: RunOptions, held_out_loss: float | None
) -> BaselineResult:
  """What a run that has ended came to."""
  log, struck = run.log, run.injector.struck
  wall_seconds = 0.0
  if log.began_at is not None and log.ended_at is not None:
    wall_seconds = log.ended_at - log.began_at
  return BaselineResult(
    steps=log.step,
    processed_steps=log.num_processed,
    tokens_per_step=(
      options.data.batch_size
      * options.data.sequence_length
      * options.membership.num_learners
    ),
    wall_seconds=wall_seconds,
    trained_seconds=log.trained_seconds,
    step_seconds=options.throttle.step_seconds or _median(log.step_times),
    is_done=log.is_done,
    stopped_by=run.stopped_by,
    generations=log.generations,
    faults=dict(Counter(s.fault.kind for s in struck if s.is_effective)),
    faults_in_vain=sum(not s.is_effective for s in struck),
    restart_seconds=_median(log.restarts),
    restart_phases={
      name: statistics.median(start[name] for start in log.starts)
      for name in (log.starts[0] if log.starts else ())
    },
    checkpoint_seconds=_median(log.checkpoint_intervals),
    checkpoint_cost_seconds=_median(log.checkpoint_costs),
    held_out_loss=held_out_loss,
  )


def as_chaos_result(result: BaselineResult) -> ChaosResult:
  """The same, as it stands beside other runs in a report."""
  wall_seconds = result.wall_seconds
  end_reason = f'{result.steps:,} steps'
  if result.checkpoint_seconds is not None:
    end_reason += f', a checkpoint every {result.checkpoint_seconds:.2g} s'
  return ChaosResult(
    is_complete=result.stopped_by is None,
    end_reason=end_reason,
    held_out_loss=result.held_out_loss,
    merged_tokens=float(result.steps * result.tokens_per_step),
    wall_seconds=wall_seconds,
    goodput=result.goodput,
    yield_=(
      result.steps / result.processed_steps if result.processed_steps else None
    ),
    participation=None,
    available=None,
    uptime=(
      min(result.trained_seconds / wall_seconds, 1.0) if wall_seconds else 0.0
    ),
    faults=result.faults,
    faults_in_vain=result.faults_in_vain,
    detect_seconds=POLL_SECONDS,
    rejoin_seconds=result.restart_seconds,
    crashes=(),
    lives=result.generations,
    refusals={},
    memory_growth={},
    problems=(),
  )


def _measured_loss(facts: WorkerFacts, log: pathlib.Path) -> float | None:
  """The held-out loss of the newest checkpoint; None if that fails."""
  reports = processes.ReportPipe()
  worker = processes.spawn(baseline_crew.command(facts), log, report=reports)
  try:
    worker.wait(_MEASURE_SECONDS)
    found = [json.loads(line) for line in reports.lines()]
    return found[-1].get('loss') if found else None
  except subprocess.TimeoutExpired:
    return None
  finally:
    processes.send(worker, signal.SIGKILL)
    worker.wait()
    reports.close()


def _median(values: Iterable[float]) -> float | None:
  found = list(values)
  return statistics.median(found) if found else None
