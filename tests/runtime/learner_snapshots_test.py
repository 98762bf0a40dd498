"""A learner's process goes on where the last one had a snapshot taken."""

import shutil

import jax
import numpy as np
import optax
import pytest

from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.runtime.learner_snapshots import LearnerSnapshots
from decoupled_diloco.runtime.snapshot_options import SnapshotOptions
from decoupled_diloco.training.mesh import MeshOptions
from decoupled_diloco.training.wire_format import WireOptions
from tests.protocol.scripts import LearnerScript
from tests.runtime.local_models import (
  BATCHES,
  EIGHT,
  EXACT,
  ONE,
  PLAN,
  assert_equal,
  initial_values,
  make_model,
  make_trainer,
  on_host,
  stage_update,
  stage_value,
  taken,
)

FEEDBACK = WireOptions(up='int4', block_size=8, up_error_feedback=True)
EVERY_TEN = SnapshotOptions(every_seconds=10.0)


def make_snapshots(folder, *, peers=(), layout='layout', told=None):
  return LearnerSnapshots(
    folder,
    peers=peers,
    layout=layout,
    options=EVERY_TEN,
    tell=(lambda text: None) if told is None else told.append,
  )


def state_at(steps: int) -> LearnerState:
  """Of a machine that has trained so many steps, one per scan."""
  learner = LearnerScript(P=2, K=1)
  for _ in range(steps):
    learner.tell(ev.ScanEnded(learner.now, 1, 100, 1.0))
  return learner.state


def wait(snapshots):
  """Until the last one is written."""
  assert snapshots._writing is not None
  snapshots._writing.result(timeout=60)


def take(snapshots, steps, model):
  """Takes a snapshot and waits until it is written."""
  snapshots.take(0.0, state_at(steps), model.snapshot())
  wait(snapshots)


def trained(wire, rule, mesh=ONE, tx=optax.sgd):
  """A model after two scans, a hand-over and an adoption between them."""
  model = make_model(wire, rule, trainer=make_trainer(mesh, tx=tx))
  model.train(BATCHES, 0)
  model.fetch(model.capture(0, 0))
  stage_value(model, 0, 1, initial_values(0, 1), wire)
  model.claim(0, 1)
  model.adopt(0, 1, 0)
  model.train(BATCHES, 2)
  return model


def go_on(model, wire):
  """A scan, an adoption and a hand-over; returns all that comes of it."""
  model.train(BATCHES, 4)
  payload = model.fetch(model.capture(0, 2))
  update = tuple(np.ones(shape.shape, np.float32) for shape in PLAN.shapes(1))
  stage_update(model, 1, 1, update, wire)
  model.claim(1, 1)
  model.adopt(1, 1, -1)
  return [on_host(model.params), payload, on_host(model.snapshot())]


@pytest.mark.parametrize(
  ('wire', 'rule'),
  [(EXACT, 'overwrite'), (EXACT, 'rebase'), (FEEDBACK, 'overwrite')],
  ids=['f32 overwrite', 'f32 rebase', 'error feedback'],
)
def test_a_new_process_goes_on_as_the_old_one_would_have(tmp_path, wire, rule):
  old = trained(wire, rule, tx=optax.adam)
  snapshots = make_snapshots(tmp_path)
  take(snapshots, 4, old)
  new = make_model(wire, rule, trainer=make_trainer(tx=optax.adam), begin=False)
  found = snapshots.restore(new.snapshot_like())
  assert found is not None
  assert found.state == state_at(4)
  new.resume(found.arrays, [1, 0])
  left, right = go_on(old, wire), go_on(new, wire)
  assert left[1] == right[1]
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    np.testing.assert_array_equal(a, b)
  snapshots.close()


@pytest.mark.parametrize(
  ('before', 'after'),
  [(MeshOptions(8), EIGHT), (EIGHT, ONE), (ONE, MeshOptions(8))],
  ids=['8x1x1 to 2x2x2', '2x2x2 to 1', '1 to 8x1x1'],
)
def test_it_may_go_on_on_another_mesh(tmp_path, before, after):
  old = trained(EXACT, 'rebase', before)
  snapshots = make_snapshots(tmp_path)
  take(snapshots, 4, old)
  new = make_model(EXACT, 'rebase', trainer=make_trainer(after), begin=False)
  found = snapshots.restore(new.snapshot_like())
  assert found is not None
  new.resume(found.arrays, [1, 0])
  assert jax.tree.leaves(new.params)[0].sharding.mesh.size == (
    after.num_devices
  )
  left, right = go_on(old, EXACT), go_on(new, EXACT)
  # All arithmetic of this task is exact, so the mesh makes no difference.
  assert left[1] == right[1]
  for p in range(2):
    assert_equal(taken(old, p), taken(new, p))
  snapshots.close()


def test_what_was_handed_over_by_a_former_process_is_given_up():
  """With `rebase`, which would keep it."""
  model = trained(EXACT, 'rebase')
  values = initial_values(0, 5)
  stage_value(model, 0, 2, values)
  model.claim(0, 2)
  model.adopt(0, 2, -1, is_anew=True)
  assert_equal(taken(model, 0), values)


def test_a_snapshot_is_due_from_time_to_time(tmp_path):
  snapshots = make_snapshots(tmp_path)
  model = trained(EXACT, 'overwrite')
  assert not snapshots.is_due(5.0)  # The first is due ten seconds later.
  assert not snapshots.is_due(14.9)
  assert snapshots.is_due(15.0)
  snapshots.take(15.0, state_at(2), model.snapshot())
  wait(snapshots)
  assert not snapshots.is_due(24.9)
  assert snapshots.is_due(25.0)
  snapshots.close()


def test_two_are_kept(tmp_path):
  snapshots = make_snapshots(tmp_path)
  model = trained(EXACT, 'overwrite')
  for steps in (2, 4, 6):
    take(snapshots, steps, model)
  assert len(list(tmp_path.iterdir())) == 2
  found = snapshots.restore(model.snapshot_like())
  assert found is not None
  assert found.state.total_steps == 6
  snapshots.close()


def test_without_snapshots(tmp_path):
  snapshots = make_snapshots(tmp_path / 'none')
  model = make_model()
  assert snapshots.restore(model.snapshot_like()) is None
  assert snapshots.restore_from_peer(model.snapshot_like()) is None
  snapshots.close()


def test_those_of_another_layout_are_set_aside(tmp_path):
  model, told = trained(EXACT, 'overwrite'), []
  snapshots = make_snapshots(tmp_path)
  take(snapshots, 40, model)
  snapshots.close()
  other = make_snapshots(tmp_path, layout='another', told=told)
  assert other.restore(model.snapshot_like()) is None
  assert 'another layout' in told[0]
  # Though of a lower number, those taken now count.
  take(other, 2, model)
  found = other.restore(model.snapshot_like())
  assert found is not None
  assert found.state.total_steps == 2
  other.close()


def test_the_optimizer_of_the_peer_that_has_come_furthest(tmp_path):
  folders = [tmp_path / name for name in ('a', 'b', 'c')]
  peers = []
  for scans, folder in zip((1, 3), folders[:2], strict=True):
    model = make_model(trainer=make_trainer(tx=optax.adam))
    for scan in range(scans):
      model.train(BATCHES, 2 * scan)
    snapshots = make_snapshots(folder)
    take(snapshots, 2 * scans, model)
    snapshots.close()
    peers.append(model)
  own = make_snapshots(folders[2], peers=folders[:2])
  model = make_model(trainer=make_trainer(tx=optax.adam))
  before = on_host(model.params)
  found = own.restore_from_peer(model.snapshot_like())
  assert found is not None
  model.take_optimizer(found.arrays)
  assert model._state is not None and peers[1]._state is not None
  jax.tree.map(
    np.testing.assert_array_equal,
    on_host(model._state.opt_state),
    on_host(peers[1]._state.opt_state),
  )
  jax.tree.map(np.testing.assert_array_equal, on_host(model.params), before)
  own.close()


def test_a_snapshot_that_cannot_be_written(tmp_path):
  told = []
  (tmp_path / 'file').write_text('in the way')
  snapshots = make_snapshots(tmp_path / 'file' / 'folder', told=told)
  take(snapshots, 2, trained(EXACT, 'overwrite'))
  assert told and told[0].startswith('no snapshot was taken: ')
  snapshots.close()


def test_a_peers_folder_is_left_as_it_is(tmp_path):
  """It may be in the middle of removing what is read here."""
  peer = make_snapshots(tmp_path / 'peer')
  model = trained(EXACT, 'overwrite')
  for steps in (2, 4):
    take(peer, steps, model)
  newest = max((tmp_path / 'peer').iterdir())
  shutil.rmtree(newest / 'params')
  told = []
  own = make_snapshots(tmp_path / 'own', peers=[tmp_path / 'peer'], told=told)
  before = sorted((tmp_path / 'peer').iterdir())
  found = own.restore_from_peer(model.snapshot_like())
  assert found is not None
  assert found.state.total_steps == 2
  assert 'is damaged' in told[0]
  assert sorted((tmp_path / 'peer').iterdir()) == before
  # Its own are for itself to set aside.
  assert peer.restore(model.snapshot_like()) is not None
  assert not newest.exists()
  for snapshots in (own, peer):
    snapshots.close()
