"""The baseline's manager: all or none, from the newest checkpoint."""

import dataclasses
import json
import math

import pytest

from decoupled_diloco import configuring
from decoupled_diloco.chaos import baseline
from decoupled_diloco.chaos.baseline_run import BaselineRun
from decoupled_diloco.chaos.schedule import Fault, FaultOptions
from decoupled_diloco.runtime.launch_options import LaunchError


def run_options(step_seconds, batch_size, sequence_length):
  config = configuring.default_config()
  config.budget.rounds = 100
  config.membership.num_learners = 2
  config.throttle.step_seconds = step_seconds
  config.data.batch_size = batch_size
  config.data.sequence_length = sequence_length
  return configuring.options_of(config)


class FakeWorker:
  def __init__(self, pid: int):
    self.pid = pid
    self.returncode: int | None = None
    self.signals: list[int] = []
    self.ignores_term = False

  def poll(self) -> int | None:
    return self.returncode

  def wait(self) -> int:
    assert self.returncode is not None
    return self.returncode

  def send_signal(self, sig: int, /) -> None:
    self.signals.append(sig)
    if sig == 9:
      self.returncode = -9
    if sig == 15 and not self.ignores_term:
      self.returncode = 0


class FakeReports:
  def __init__(self):
    self.due: list[str] = []

  def lines(self) -> list[str]:
    due, self.due = self.due, []
    return due

  def close(self) -> None:
    pass


class Scene:
  """Two workers that start in 5 s and then step once a second.

  A checkpoint is there after every third step.
  """

  def __init__(self, *faults, wall_seconds=60.0, num_steps=1000, stuck=()):
    self.now = 0.0
    self.generations = []
    self.reports = FakeReports()
    self.checkpoint = self.step = 0
    self.next_step_at = 0.0
    self.num_steps = num_steps
    self.told = []
    self.stuck = stuck  # Generations that never take a step.
    self.last_checkpoint_fails = self.is_broken = False
    self.is_starting = True
    self.run = BaselineRun(
      iter(faults),
      wall_seconds=wall_seconds,
      restart_seconds=1.0,
      stall_seconds=4.0,
      start_seconds=30.0,
      stop_seconds=10.0,
      spawn=self.spawn,
      newest_checkpoint=lambda: self.checkpoint,
      tell=self.told.append,
      clock=lambda: self.now,
      sleep=self.sleep,
    )

  def spawn(self):
    generation = len(self.generations)
    workers = [FakeWorker(10 * generation + m) for m in range(2)]
    workers[0].ignores_term = self.last_checkpoint_fails
    if self.is_broken:
      workers[1].returncode = 1
    self.generations.append(workers)
    self.reports = FakeReports()
    self.step = self.checkpoint
    self.is_starting = True
    self.next_step_at = self.now + 5.0
    return workers, self.reports

  def report(self, **what):
    self.reports.due.append(json.dumps(what))

  def sleep(self, seconds):
    """Time passes: here the workers do what they do."""
    self.now += seconds
    workers = self.generations[-1]
    if any(worker.returncode is not None for worker in workers):
      return
    frozen = [w.signals.count(19) > w.signals.count(18) for w in workers]
    if any(frozen) or len(self.generations) - 1 in self.stuck:
      self.next_step_at = max(self.next_step_at, self.now + 1.0)
      return
    if self.now >= self.next_step_at:
      if self.is_starting:
        self.is_starting = False
        self.report(start={'load': 4.0, 'first step': 1.0})
      self.next_step_at += 1.0
      self.step += 1
      self.report(step=self.step, step_seconds=0.5)
      if self.step % 3 == 0:
        self.checkpoint = self.step
        self.report(checkpoint=self.step, seconds=0.1, interval=3.0)
      if self.step == self.num_steps:
        for worker in workers:
          worker.returncode = 0


def test_undisturbed():
  scene = Scene(wall_seconds=20.0)
  scene.run.run()
  log = scene.run.log
  # The first step, after 5 s, begins the 20 s; there are 20 more.
  assert log.began_at == pytest.approx(5.0, abs=0.1)
  assert log.step == log.num_processed == 21
  assert log.trained_seconds == pytest.approx(20.0, abs=0.1)
  assert (log.generations, log.deaths) == (1, 0)
  assert log.checkpoint_costs == [0.1] * 7
  assert log.checkpoint_intervals == [3.0] * 7
  # The first one saves what has been trained, and nobody is left.
  assert [w.signals for w in scene.generations[-1]] == [[15], [9]]
  assert [w.returncode for w in scene.generations[-1]] == [0, -9]


def test_a_last_checkpoint_that_is_not_taken():
  scene = Scene(wall_seconds=20.0)
  scene.last_checkpoint_fails = True
  scene.run.run()
  assert scene.told == [
    'the last checkpoint was not taken; the newest one counts'
  ]
  # It is waited for, and does not add to the time.
  assert scene.now == pytest.approx(5.0 + 20.0 + 10.0, abs=0.2)
  log = scene.run.log
  assert log.began_at is not None and log.ended_at == log.began_at + 20.0
  assert log.step == 21


def test_a_death_ends_all_and_costs_what_no_checkpoint_has():
  # 7.5 s after the first step there have been 8.
  scene = Scene(Fault(7.5, 'kill', (1,)), wall_seconds=20.0)
  scene.run.run()
  log = scene.run.log
  assert [w.returncode for w in scene.generations[0]] == [-9, -9]
  assert scene.told == [
    'Kills learner 1',
    'worker 1 is dead; all start again at step 6',
  ]
  # A pause of 1 s and a start of 5 s.
  assert log.restarts == [pytest.approx(6.0, abs=0.1)]
  # 7.5 + 6.0 s are over when step 7 is done again; 6 more follow.
  assert log.step == 13
  assert log.num_processed == 15  # 7 and 8 were done twice.
  assert (log.generations, log.deaths) == (2, 1)
  assert log.trained_seconds == pytest.approx(7.0 + 6.0, abs=0.1)
  # The first start is none from a checkpoint, and does not count.
  assert log.starts == [{'load': 4.0, 'first step': 1.0}]


def test_a_death_while_all_start_begins_anew():
  scene = Scene(
    Fault(7.5, 'kill', (1,)), Fault(10.5, 'kill', (0,)), wall_seconds=30.0
  )
  scene.run.run()
  # 3 s later all had to start once more: 9 s in all.
  assert scene.run.log.restarts == [pytest.approx(9.0, abs=0.1)]
  assert scene.run.log.generations == 3


def test_a_short_freeze_is_waited_for():
  scene = Scene(Fault(7.5, 'freeze', (0,), 2.0), wall_seconds=20.0)
  scene.run.run()
  assert scene.run.log.generations == 1
  assert scene.run.log.step < 21


@pytest.mark.parametrize('kind', ['freeze', 'partition'])
def test_a_long_one_is_not(kind):
  scene = Scene(Fault(7.5, kind, (0,), 10.0), wall_seconds=30.0)
  scene.run.run()
  assert scene.run.log.generations == 2
  assert 'no step for 4 s; all start again at step 6' in scene.told


def test_what_does_not_befall_one_site_is_left_out():
  faults = [
    Fault(1.0, 'slow', (0,), 9.0),
    Fault(2.0, 'corrupt', (0,)),
    Fault(3.0, 'syncer', ()),
  ]
  scene = Scene(*faults, wall_seconds=10.0)
  scene.run.run()
  assert scene.run.injector.struck == []
  assert scene.run.log.step == 11


def test_all_steps_are_done():
  scene = Scene(num_steps=6)
  scene.run.run()
  assert scene.run.log.is_done
  assert scene.run.log.step == 6


def test_a_stop():
  scene = Scene(wall_seconds=1e9)
  scene.run.request_stop(2)
  scene.run.run()
  assert scene.run.stopped_by == 2
  assert all(w.returncode == -9 for w in scene.generations[-1])


def test_workers_that_never_train():
  scene = Scene(stuck=(0,))
  with pytest.raises(LaunchError, match='has not taken a step within 30 s'):
    scene.run.run()
  assert all(w.returncode == -9 for w in scene.generations[-1])


def test_a_worker_that_dies_before_anything_has_struck():
  scene = Scene()
  scene.is_broken = True
  with pytest.raises(LaunchError, match='worker 1 of the baseline has ended'):
    scene.run.run()
  assert scene.generations[0][0].returncode == -9


def test_the_rate_of_what_ends_a_job():
  faults = FaultOptions(
    mean_seconds_between=10.0,
    weights={'kill': 1.0, 'freeze': 2.0, 'site': 1.0},
    mean_seconds={'freeze': 4.0},
    sites=((0, 1),),
  )
  # Half of them are kills, and hardly any freeze lasts that long.
  rate = baseline.failure_seconds(faults, 1000.0, wall_seconds=60.0)
  assert rate == pytest.approx(20.0)
  # A freeze lasts 4 s or longer with a probability of 1/e.
  rate = baseline.failure_seconds(faults, 4.0, wall_seconds=60.0)
  assert rate == pytest.approx(40.0 / (2.0 + 2.0 / math.e))
  none = dataclasses.replace(faults, mean_seconds_between=0.0)
  assert baseline.failure_seconds(none, 4.0, 60.0) == float('inf')
  fixed = dataclasses.replace(
    none,
    schedule=(
      (1.0, 'kill', (0,), 0.0),
      (9.0, 'freeze', (0,), 3.0),  # The others wait for it.
      (20.0, 'partition', (1,), 5.0),
      (30.0, 'syncer', (), 0.0),  # There is none.
      (61.0, 'kill', (0,), 0.0),  # It is over by then.
    ),
  )
  # Two of them in a minute.
  assert baseline.failure_seconds(fixed, 4.0, 60.0) == pytest.approx(30.0)


def test_figures():
  scene = Scene(Fault(7.5, 'kill', (1,)), wall_seconds=20.0)
  scene.run.run()
  run = run_options(step_seconds=0.5, batch_size=4, sequence_length=32)
  result = baseline.result_of(scene.run, run, 1.5)
  assert result.wall_seconds == pytest.approx(20.0)
  # 13 steps of 0.5 s live on, in 20 s.
  assert result.goodput == pytest.approx(13 * 0.5 / 20)
  # Both workers read 4 x 32 tokens in each.
  assert result.tokens_per_step == 2 * 4 * 32
  assert result.restart_seconds == pytest.approx(6.0, abs=0.1)
  assert result.restart_phases == {'load': 4.0, 'first step': 1.0}
  assert result.checkpoint_seconds == 3.0
  assert result.checkpoint_cost_seconds == 0.1
  beside = baseline.as_chaos_result(result)
  assert beside.goodput == result.goodput
  assert beside.yield_ == pytest.approx(13 / 15)
  assert beside.merged_tokens == 13 * 2 * 4 * 32
  assert beside.faults == {'kill': 1}


def test_undisturbed_workers_are_as_fast_as_those_that_are_not_paced():
  scene = Scene(wall_seconds=20.0)
  scene.run.run()
  run = run_options(step_seconds=0.0, batch_size=4, sequence_length=32)
  result = baseline.result_of(scene.run, run, None)
  # The workers say that each step took 0.5 s.
  assert result.step_seconds == 0.5


def test_a_run_that_is_done_early_took_no_longer():
  scene = Scene(num_steps=6, wall_seconds=1000.0)
  scene.run.run()
  run = run_options(step_seconds=1.0, batch_size=4, sequence_length=32)
  result = baseline.result_of(scene.run, run, None)
  assert result.is_done and result.steps == 6
  # The first step begins the 5 s that the others take.
  assert result.wall_seconds == pytest.approx(5.0, abs=0.1)
