"""A learner put together, before it looks for its syncer."""

import dataclasses

import pytest

from decoupled_diloco import learner_role
from decoupled_diloco.runtime.learner_receiver import SyncerUnreachableError
from tests.tiny_run import tiny_options


@pytest.fixture
def options(tmp_path):
  """Of learner 1 of two; there is no syncer."""
  options = tiny_options(tmp_path)
  syncer = dataclasses.replace(
    options.syncer, address='127.0.0.1:1', connect_seconds=0.2
  )
  return dataclasses.replace(options, role='learner', learner=1, syncer=syncer)


def test_what_it_is_made_of(options):
  setup = learner_role.set_up_learner(options)
  # K = H / P = 2 steps of 2 windows of 16 + 1 tokens.
  assert setup.example['tokens'].shape == (2, 2, 17)
  assert setup.options.model.vocab_size == 256
  assert setup.plan.num_fragments == 2
  assert setup.machine_options.learner == 1
  assert setup.machine_options.keeps_progress  # The default: rebase.
  batches = setup.open_batches(0)
  assert (next(batches)['tokens'] == setup.example['tokens']).all()
  batches.close()


def test_its_batches_go_on_where_it_was(options):
  setup = learner_role.set_up_learner(options)
  batches = setup.open_batches(0)
  next(batches)
  second = next(batches)['tokens']
  batches.close()
  again = setup.open_batches(2)  # After one scan of K = 2.
  assert (next(again)['tokens'] == second).all()
  again.close()


def test_more_devices_than_there_are(options):
  mesh = dataclasses.replace(options.mesh, data=64)
  with pytest.raises(ValueError, match=r'data=64 .*devices'):
    learner_role.set_up_learner(dataclasses.replace(options, mesh=mesh))


def test_without_a_syncer_it_ends(options, monkeypatch):
  # Handlers would stay after the test.
  monkeypatch.setattr(learner_role.stopping, 'in_order', lambda stop: None)
  setup = learner_role.set_up_learner(options)
  told = []
  with pytest.raises(SyncerUnreachableError, match='syncer'):
    learner_role.run_learner(setup, told.append)
  assert told[0].startswith('uses 1 of 8 devices')
