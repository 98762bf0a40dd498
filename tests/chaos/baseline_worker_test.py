"""Real workers of the baseline: killed, they go on from their checkpoint."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from decoupled_diloco import configuring
from decoupled_diloco.chaos import baseline, checkpoint_file, given
from decoupled_diloco.chaos.checkpoint_pace import (
  BackgroundCheckpoints,
  young_interval,
)
from decoupled_diloco.chaos.options import BaselineOptions
from decoupled_diloco.chaos.schedule import FaultOptions
from tests.chaos import small_chaos
from tests.integration.real_runs import processes_of, wait_for


def test_checkpoints_replace_each_other(tmp_path):
  folder = tmp_path / 'checkpoints'
  state = {'a': np.arange(3.0), 'b': (np.int32(7),)}
  assert checkpoint_file.steps(folder) == []
  assert checkpoint_file.restore(folder, state) is None
  checkpoint_file.save(folder, 4, state)
  later = {'a': np.arange(3.0) + 1, 'b': (np.int32(8),)}
  checkpoint_file.save(folder, 9, later)
  # What was not finished does not count.
  (folder / 'step-12.unfinished').write_bytes(b'half')
  assert checkpoint_file.steps(folder) == [9]
  found = checkpoint_file.restore(folder, state)
  assert found is not None and found[0] == 9
  np.testing.assert_array_equal(found[1]['a'], later['a'])
  assert found[1]['b'] == (8,)


def test_youngs_rule():
  # sqrt(2 x 0.5 s x 100 s)
  assert young_interval(0.5, 100.0) == 10.0


class Clock:
  now = 0.0

  def __call__(self) -> float:
    return self.now


def test_checkpoints_are_taken_as_often_as_the_rule_says(tmp_path):
  clock, reports = Clock(), []

  def report(*what):
    reports.append(what)
    written.set()

  written = threading.Event()
  checkpoints = BackgroundCheckpoints(
    tmp_path,
    every_seconds=10.0,
    failure_seconds=100.0,
    report=report,
    clock=clock,
  )
  checkpoints.poll(1, {'a': np.ones(3)})  # It is not time yet.
  clock.now = 10.0
  checkpoints.poll(2, {'a': np.ones(3)})
  assert written.wait(20.0)
  assert reports == [(2, 0.0, 10.0)]
  # The last one is taken whether it is time or not.
  checkpoints.finish(3, {'a': np.ones(3)})
  assert checkpoint_file.steps(tmp_path) == [3]


def test_a_checkpoint_that_cannot_be_written_is_an_error(tmp_path):
  (tmp_path / 'file').write_text('')
  checkpoints = BackgroundCheckpoints(
    tmp_path / 'file',
    every_seconds=0.0,
    failure_seconds=100.0,
    report=lambda *what: None,
  )
  with pytest.raises(OSError):
    checkpoints.finish(1, {'a': np.ones(3)})


def a_small_run(folder, rounds):
  config = small_chaos.get_config().run
  config.budget.rounds = rounds
  config.inner.warmup_steps = 10
  config.workdir = str(folder)
  path = folder / 'run.json'
  given.write(config, path)
  return configuring.options_of(config), path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill(tmp_path):
  options, path = a_small_run(tmp_path, rounds=30)  # 120 steps of 20 ms.
  told = []
  result = baseline.run_baseline(
    options,
    path,
    tmp_path,
    faults=FaultOptions(
      mean_seconds_between=0.0, schedule=((1.0, 'kill', (1,), 0.0),)
    ),
    baseline=BaselineOptions(checkpoint_seconds=0.2, stall_seconds=60.0),
    wall_seconds=280.0,
    tell=told.append,
  )
  assert result.is_done and result.steps == 120, told
  assert result.generations == 2
  assert result.faults == {'kill': 1}
  # A checkpoint was taken before.
  assert 'all start again at step 0' not in told[-1]
  assert 120 <= result.processed_steps < 240
  assert result.checkpoint_seconds == 0.2
  assert result.checkpoint_cost_seconds is not None
  assert set(result.restart_phases) >= {'connect', 'restore', 'compile'}
  assert result.restart_seconds is not None
  # Of an untrained model it is log(256) = 5.5 and more.
  assert result.held_out_loss is not None and 1.0 < result.held_out_loss < 4.5
  assert not processes_of(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_end_of_the_time(tmp_path):
  options, path = a_small_run(tmp_path, rounds=100_000)
  result = baseline.run_baseline(
    options,
    path,
    tmp_path,
    faults=FaultOptions(mean_seconds_between=0.0),
    baseline=BaselineOptions(checkpoint_seconds=1000.0, stall_seconds=60.0),
    wall_seconds=1.0,
    tell=lambda text: None,
  )
  assert not result.is_done and result.generations == 1
  # No other checkpoint was taken than the last one, of all that was trained.
  [step] = checkpoint_file.steps(tmp_path / 'checkpoints')
  assert step >= result.steps > 0
  assert result.held_out_loss is not None
  assert not processes_of(tmp_path)


_MANAGER = """
import pathlib, sys
from decoupled_diloco import configuring
from decoupled_diloco.chaos import baseline, given
from decoupled_diloco.chaos.options import BaselineOptions
from decoupled_diloco.chaos.schedule import FaultOptions

folder = pathlib.Path(sys.argv[1])
config = given.get_config(folder / 'run.json')
baseline.run_baseline(
  configuring.options_of(config), folder / 'run.json', folder,
  faults=FaultOptions(mean_seconds_between=0.0),
  baseline=BaselineOptions(stall_seconds=60.0),
  wall_seconds=1000.0, tell=print,
)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != 'linux', reason='needs PR_SET_PDEATHSIG')
def test_workers_end_with_who_has_started_them(tmp_path):
  a_small_run(tmp_path, rounds=100_000)
  manager = subprocess.Popen([sys.executable, '-c', _MANAGER, str(tmp_path)])
  try:
    # The first checkpoint: they train.
    wait_for(lambda: checkpoint_file.steps(tmp_path / 'checkpoints'), manager)
  finally:
    manager.kill()
    manager.wait()
  wait_for(lambda: not processes_of(tmp_path))
