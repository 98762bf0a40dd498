"""Studies: variants, cells, and a whole one from end to end."""

import json
import pathlib
import runpy

import jax
import numpy as np
import pytest

import decoupled_diloco as ddl
from decoupled_diloco.lab import run_config, running, study

STUDIES = sorted(
  pathlib.Path(__file__).parents[2].joinpath('configs', 'lab').glob('*.py')
)


def tiny(workdir=''):
  """One layer of 16, two learners, six rounds."""
  config = study.default_study('tiny')
  config.workdir = str(workdir)
  config.seeds = (0, 1)
  run = config.run
  run.data.source = 'python'
  run.data.sequence_length = 16
  run.data.batch_size = 2
  run.model.width = 16
  run.model.layers = 1
  run.model.heads = 2
  run.model.kv_heads = 2
  run.inner.warmup_steps = 2
  run.schedule.sync_every = 4
  run.schedule.num_fragments = 2
  run.membership.num_learners = 2
  run.budget.rounds = 6
  run.evaluation.batches = 2
  run.cluster.evaluate_every_rounds = 2
  return config


def test_cells_are_all_variants_with_all_seeds():
  config = tiny()
  for rate in (1e-3, 2e-3):
    study.add(
      config,
      factors={'H': 4},
      choice={'lr': rate},
      changes={'inner.learning_rate': rate, 'learners': {'1': {'speed': {}}}},
    )
  cells = study.cells_of(config)
  assert [(cell.seed, cell.variant.choice['lr']) for cell in cells] == [
    (0, 1e-3),
    (0, 2e-3),
    (1, 1e-3),
    (1, 2e-3),
  ]
  assert {cell.variant.row for cell in cells} == {'H=4'}
  assert cells[1].run['inner']['learning_rate'] == 2e-3
  assert cells[2].run['seed'] == 1
  # Keys tell runs apart, and are the same in another process.
  keys = [cell.key for cell in cells]
  assert len(set(keys)) == 4
  assert keys == [cell.key for cell in study.cells_of(config)]
  # The config itself is as it was.
  assert config.run.inner.learning_rate == 3e-3


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({'schedule.H': 3}, r"'schedule\.H' is no field"),
    ({'nothing.at': 3}, r"'nothing\.at' is no field"),
    ({'seed.x': 3}, r"'seed\.x' is no field"),
  ],
)
def test_changes_must_name_fields(changes, match):
  config = tiny()
  study.add(config, factors={'a': 1}, changes=changes)
  with pytest.raises(ValueError, match=match):
    study.cells_of(config)


def test_a_study_has_variants_that_differ():
  config = tiny()
  with pytest.raises(ValueError, match='0 and 2'):
    study.cells_of(config)
  for _ in range(2):
    study.add(config, factors={'a': 1}, changes={})
  with pytest.raises(ValueError, match="are named 'a=1'"):
    study.cells_of(config)


def test_a_variant_that_cannot_run_is_found_before_anything_does(tmp_path):
  config = tiny(tmp_path / 'study')
  study.add(config, factors={'H': 3}, changes={'schedule.sync_every': 3})
  with pytest.raises(ValueError, match=r"'H=3': .*sync_every=3 must be"):
    running.Study(config)


def test_modes_fix_what_they_are():
  config = tiny()
  for mode in run_config.MODES[1:3]:
    changes = {'cluster.mode': mode, 'schedule.num_fragments': 1}
    study.add(config, factors={'mode': mode}, changes=changes)
  for cell in study.cells_of(config):
    options = run_config.options_of(cell.run)
    assert options.run.quorum.min_learners == 2
    assert options.run.lead.on_lead_limit == 'wait'
  config.run.cluster.mode = 'diloco'
  with pytest.raises(
    ValueError, match=r'needs schedule\.num_fragments=1, not 2'
  ):
    run_config.options_of(config.run.to_dict())
  with pytest.raises(ValueError, match="mode='x' must be one of"):
    config.run.cluster.mode = 'x'
    run_config.options_of(config.run.to_dict())


def test_learners_may_have_their_own_speeds_links_and_batches():
  config = tiny()
  config.run.learners = {
    '1': {'speed': {'step_seconds': 2.0}, 'data': {'batch_size': 3}}
  }
  options = run_config.options_of(config.run.to_dict())
  assert [speed.step_seconds for speed in options.speeds] == [1.0, 2.0]
  assert [each.data.batch_size for each in options.learners] == [2, 3]


@pytest.mark.parametrize('path', STUDIES, ids=lambda path: path.stem)
def test_the_studies_of_the_project_can_run(path):
  config = runpy.run_path(str(path))['get_config']()
  assert config.name == path.stem
  assert f'--config=configs/lab/{path.name}' in path.read_text()
  cells = study.cells_of(config)
  assert len({cell.seed for cell in cells}) >= 3
  for cell in cells:
    run_config.options_of(cell.run)


def test_a_study_from_end_to_end(tmp_path, capsys):
  """It runs what is missing, and only that; tables and plot are there."""
  config = tiny(tmp_path)
  config.processes = 1
  config.seeds = (0,)
  for mode in ('data_parallel', 'decoupled'):
    study.add(config, factors={'mode': mode}, changes={'cluster.mode': mode})
  config.reference.mode = 'data_parallel'
  config.plot.x = 'mode'
  lab = running.Study(config)
  lab.run()
  found = [
    json.loads(line)
    for line in (tmp_path / 'results.jsonl').read_text().splitlines()
  ]
  assert [each['variant'] for each in found] == [
    'mode=data_parallel',
    'mode=decoupled',
  ]
  for each in found:
    # A byte costs ln 256 = 5.5 nats before anything is learnt.
    assert 3 < each['loss'] < 6.5
    # 6 rounds of 2 steps of 2 x 2 x 16 tokens, and what the drain adds.
    assert each['processed_tokens'] >= 6 * 2 * 2 * 2 * 16
    assert len(each['curve']) >= 4
  assert '[2/2] mode=decoupled, seed 0: loss' in capsys.readouterr().out
  assert '| decoupled |' in (tmp_path / 'table.md').read_text()
  assert (tmp_path / 'table.csv').read_text().startswith('mode,loss,')
  assert (tmp_path / 'plot.png').stat().st_size > 10_000

  config.seeds = (0, 1)
  running.Study(config).run()
  assert '2 of 4 runs are there already' in capsys.readouterr().out
  assert len((tmp_path / 'results.jsonl').read_text().splitlines()) == 4


def test_the_same_config_gives_the_same_run():
  config = tiny().run
  first, second = (ddl.VirtualCluster(config).run() for _ in range(2))
  assert first.tape() == second.tape()
  jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
  assert first.loss == second.loss
  config.seed = 1
  assert ddl.VirtualCluster(config).run().loss != first.loss


def test_a_run_that_diverges_is_a_finding():
  config = tiny()
  config.run.inner.learning_rate = 1e20
  config.run.inner.clip_norm = 0.0
  result = running.run_one(config.run.to_dict())
  assert result['loss'] == float('inf')
  assert 'diverged' in result['error']


def test_a_config_of_something_else_is_refused():
  with pytest.raises(ValueError, match=r'cluster, .* are missing; begin with'):
    ddl.VirtualCluster({'model': {}})


def test_the_config_of_a_run_is_no_study():
  with pytest.raises(ValueError, match='must have name, plot, processes'):
    study.cells_of(run_config.default_run())


@pytest.mark.parametrize('mode', ['data_parallel', 'decoupled'])
def test_images_train_as_text_does(mode):
  run = tiny().run
  run.task = 'image'
  run.vit.width, run.vit.layers = 16, 1
  run.vit.heads, run.vit.kv_heads = 2, 2
  run.images.batch_size = 16
  run.cluster.mode = mode
  run.budget.rounds = 20
  result = ddl.VirtualCluster(run).run()
  assert result.processed_tokens >= 20 * 2 * 2 * 16
  assert result.points[0].loss > result.loss > 0.0
