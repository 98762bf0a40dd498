"""The config of an experiment is checked, and that of its runs handed on."""

import itertools
import pathlib
import runpy

import pytest

from decoupled_diloco import configuring
from decoupled_diloco.chaos import given, options, schedule

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def config():
  found = options.default_config()
  found.run.budget.rounds = 100
  found.run.membership.num_learners = 3
  return found


def test_kinds_that_are_left_out_do_not_occur(config):
  found = options.options_of(config)
  assert dict(found.faults.weights) == {'kill': 1.0}
  config.faults.weights.freeze = 2.0
  assert options.options_of(config).faults.weights['freeze'] == 2.0


@pytest.mark.parametrize(
  'change, part',
  [
    (lambda c: c.update(phases=('chaos',)), 'must be some of decoupled'),
    (lambda c: c.update(slow_bytes_per_second=0.0), 'must be positive'),
    (lambda c: c.faults.update(sites=((0, 3),)), 'config.faults: sites'),
    (lambda c: c.faults.weights.update(kil=1.0), "the kind 'kil'"),
    (
      lambda c: c.run.launch.update(kill=((0, 0.5),)),
      'config.run.launch.kill=',
    ),
    (lambda c: c.baseline.update(stall_seconds=0.0), 'config.baseline: '),
  ],
)
def test_mistakes(config, change, part):
  change(config)
  with pytest.raises(ValueError) as caught:
    options.options_of(config)
  assert part in str(caught.value)


def test_a_run_config_is_handed_on(config, tmp_path):
  config.run.learners = {'1': {'throttle': {'step_seconds': 0.2}}}
  config.run.inner.learning_rate = 0.25
  path = tmp_path / 'a' / 'run.json'
  argument = given.write(config.run, path)
  assert argument.endswith(f'given.py:{path}')
  read = given.get_config(str(path))
  for learner in (0, 1):
    before = configuring.options_of(config.run, learner)
    assert configuring.options_of(read, learner) == before


@pytest.mark.parametrize(
  'name', ['chaos', 'chaos:8', 'chaos_soak', 'chaos_syncer']
)
def test_the_experiments_that_there_are(name):
  file, _, argument = name.partition(':')
  module = runpy.run_path(str(ROOT / 'configs' / f'{file}.py'))
  config = module['get_config'](*([argument] if argument else []))
  found = options.options_of(config)
  assert list(itertools.islice(schedule.faults(found.faults, 4), 3))
  assert found.run.membership.num_learners == int(
    argument or len(found.learners)
  )
