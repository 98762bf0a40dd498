"""Real workers of the baseline: killed, they go on from their checkpoint."""

import dataclasses
import os

import numpy as np
import pytest

from decoupled_diloco import configuring
from decoupled_diloco.chaos import baseline, checkpoint_file, given
from decoupled_diloco.chaos.baseline_worker import young_interval
from decoupled_diloco.chaos.options import BaselineOptions
from decoupled_diloco.chaos.schedule import Fault, FaultOptions
from tests.chaos import small_chaos


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


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_kill(tmp_path):
  config = small_chaos.get_config().run
  config.budget.rounds = 30  # 120 steps of 20 ms.
  config.inner.warmup_steps = 10
  config.workdir = str(tmp_path)
  path = tmp_path / 'run.json'
  given.write(config, path)
  options = configuring.options_of(config)
  told = []
  settings = BaselineOptions(checkpoint_seconds=0.2, stall_seconds=30.0)
  faults = FaultOptions()
  run = baseline.baseline_run(
    options,
    path,
    tmp_path,
    iter([Fault(1.0, 'kill', (1,))]),
    fault_options=faults,
    baseline=settings,
    wall_seconds=200.0,
    tell=told.append,
  )
  run.run()
  log = run.log
  assert log.is_done and log.step == 120, told
  assert (log.generations, log.deaths) == (2, 1)
  # About ten checkpoints were taken before.
  assert 'all start again at step 0' not in told[-1]
  assert 120 <= log.num_processed < 240
  assert log.checkpoint_costs
  for struck in run.injector.struck:
    for pid in struck.pids:
      with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
  facts = baseline.worker_facts(
    options, path, tmp_path, -1, '', settings, faults
  )
  loss = baseline.measured_loss(facts, tmp_path / 'measure.log')
  # Of an untrained model it is log(256) = 5.5 and more.
  assert loss is not None and 1.0 < loss < 4.5
  result = baseline.result_of(run, options, 100.0, loss)
  assert dataclasses.asdict(result)['lives'] == 2
