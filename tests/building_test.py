"""What is built from the options, and what is found out before a run."""

import dataclasses

import pytest

from decoupled_diloco import building, tasks
from tests.tiny_run import tiny_options


@pytest.fixture
def options(tmp_path):
  """Of a tiny run."""
  return tiny_options(tmp_path)


def _with(options, section, **changes):
  changed = dataclasses.replace(getattr(options, section), **changes)
  return dataclasses.replace(options, **{section: changed})


def test_what_fits(options):
  building.check(options, [options])
  options = building.with_vocabulary(options)
  assert options.model.vocab_size == 256
  task = building.build_task(options)
  assert building.build_plan(options, task).num_fragments == 2
  assert building.open_pipeline(options).shard == 0
  held_out = building.held_out(options)
  assert held_out is not None and held_out['tokens'].shape == (2, 2, 17)
  assert building.held_out(_with(options, 'evaluation', batches=0)) is None


@pytest.mark.parametrize(
  ('section', 'changes', 'says'),
  [
    ('data', {'source': '/no/such/*.txt'}, 'config.data: source must'),
    ('data', {'tokenizer': '/no/such'}, 'config.data: tokenizer='),
    ('schedule', {'num_fragments': 600}, 'config.schedule, config.fragments: '),
  ],
)
def test_what_does_not_fit(options, section, changes, says):
  if section == 'schedule':
    changes['sync_every'] = 600
  with pytest.raises(ValueError, match=says):
    building.check(_with(options, section, **changes), [])


def test_the_text_of_every_learner_is_looked_for(options):
  other = _with(options, 'data', source='/no/such/*.txt')
  with pytest.raises(ValueError, match='/no/such'):
    building.check(options, [options, other])


def test_too_little_text(options):
  little = _with(options, 'data', sequence_length=2000)
  with pytest.raises(ValueError, match=r'config.data: .*use more text'):
    building.open_pipeline(little)
  with pytest.raises(ValueError, match=r'evaluation.batches: .*use more text'):
    building.held_out(little)


def test_files_without_text(options, tmp_path):
  (tmp_path / 'empty.txt').touch()
  empty = _with(options, 'data', source=str(tmp_path / 'em*.txt'))
  with pytest.raises(ValueError, match=r'must hold text.* choose other files'):
    building.check(empty, [])


def make_task(options):
  """A task that somebody has written."""
  return tasks.language_model_task(options.model)


def make_nothing(options):
  """A function that is no task's."""
  del options


def make_trouble(options):
  """A bug in somebody's function."""
  raise ValueError(f'a bug, {options.role}')


def test_a_task_of_the_users(options):
  options = dataclasses.replace(options, task=f'{__name__}:make_task')
  assert isinstance(building.build_task(options), tasks.Task)


@pytest.mark.parametrize(
  'name',
  [
    *('os:getcwd', 'os:environ', 'os:no_such', 'no_such:x', 'nothing', '', ':'),
    f'{__name__}:make_nothing',
  ],
)
def test_what_is_no_task(options, name):
  options = dataclasses.replace(options, task=name)
  says = rf"config.task='{name}' must be .*; correct it\."
  with pytest.raises(ValueError, match=says):
    building.build_task(options)


def test_a_bug_in_a_task_keeps_its_traceback(options):
  options = dataclasses.replace(options, task=f'{__name__}:make_trouble')
  with pytest.raises(ValueError, match=r'^a bug, local'):
    building.build_task(options)
