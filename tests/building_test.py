"""What is built from the options, and what is found out before a run."""

import dataclasses

import jax
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
  options = building.fitted_to_data(options)
  assert options.model.vocab_size == 256
  task = building.build_task(options)
  assert building.build_plan(options, task).num_fragments == 2
  assert building.open_pipeline(options).shard == 0
  held_out = building.held_out(options)
  assert held_out is not None and held_out['tokens'].shape == (2, 2, 17)
  assert building.held_out(_with(options, 'evaluation', batches=0)) is None


def test_images(options):
  images = _with(options, 'images', batch_size=16, num_shards=3)
  images = dataclasses.replace(
    images,
    task='image',
    learner=2,
    vit=dataclasses.replace(images.vit, image_size=32, patch_size=4),
  )
  building.check(images, [images])
  images = building.fitted_to_data(images)
  assert images.vit.image_size == 8 and images.vit.num_classes == 10
  pipeline = building.open_pipeline(images)
  assert pipeline.shard == 2
  batch = pipeline.batch(0)
  held_out = building.held_out(images)
  assert held_out is not None and held_out['image'].shape == (2, 16, 8, 8, 1)
  task = building.build_task(images)
  params = task.init(jax.random.key(0))
  assert task.loss(params, batch, jax.random.key(1))[0] > 0
  many = _with(images, 'images', batch_size=1000, num_shards=3)
  with pytest.raises(ValueError, match=r'config.images: there must be 3000 im'):
    building.open_pipeline(many)
  with pytest.raises(
    ValueError, match=r'config.vit: image_size=8 must be a multiple of'
  ):
    building.fitted_to_data(
      _with(_with(images, 'vit', image_size=9, patch_size=3), 'vit')
    )


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
