"""What a learner compiles, and how it lies on one device and on eight."""

import jax
import numpy as np
import optax
import pytest

from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.ops.outer import outer_optimizer
from decoupled_diloco.runtime.learner_programs import Held, LearnerPrograms
from decoupled_diloco.runtime.local_model import LocalModel, Staging
from decoupled_diloco.tasks import language_model_task
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.mesh import make_mesh
from decoupled_diloco.training.step import make_train_scan
from decoupled_diloco.training.wire_format import (
  WireOptions,
  wire_format,
)
from tests.runtime.local_models import (
  BATCHES,
  EIGHT,
  ONE,
  PLAN,
  RNG,
  RULES,
  K,
  assert_lie_alike,
  claim_and_adopt,
  claim_and_begin,
  initial_values,
  make_model,
  make_trainer,
  on_host,
  payload_of,
  stage_value,
)
from tests.training.compilations import compilations


@pytest.mark.parametrize('mesh', [ONE, EIGHT], ids=['one', 'eight'])
@pytest.mark.parametrize('rule', RULES)
def test_warming_up_changes_nothing(rule, mesh):
  wire = WireOptions(up_error_feedback=rule != 'rebase', block_size=8)
  model = make_model(wire, rule, trainer=make_trainer(mesh), begin=False)
  for p in range(2):
    # Not even 0 + -0 = -0 holds to the last bit.
    values = np.random.default_rng(p).normal(size=64)
    values[::5] = -0.0
    stage_value(
      model,
      p,
      1,
      [
        np.resize(values, shape.shape).astype(np.float32)
        for shape in PLAN.shapes(p)
      ],
    )
  claim_and_begin(model, [1, 1], RNG)
  before = [on_host(model.params), on_host([model.base(0), model.base(1)])]
  model.compile(BATCHES)
  after = [on_host(model.params), on_host([model.base(0), model.base(1)])]
  for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize('mesh', [ONE, EIGHT], ids=['one', 'eight'])
@pytest.mark.parametrize('rule', RULES)
def test_once_compiled_no_boundary_compiles(rule, mesh):
  wire = WireOptions(up_error_feedback=rule != 'rebase', block_size=8)
  trainer = make_trainer(mesh)
  model = make_model(wire, rule, trainer=trainer)
  model.compile(BATCHES)
  down = wire_format(wire).down
  updates = [payload_of(down, initial_values(p)) for p in range(2)]
  versions = [0, 0]
  with compilations() as found:
    for round_ in range(8):
      p = round_ % 2
      model.train(BATCHES, 0)
      captured = model.capture(p, round_)
      if round_ < 4:  # Else an older version is adopted before it is fetched.
        model.fetch(captured)
      # An older version while the hand-over is in flight, then its own.
      for merged_round in (-1, round_ if round_ % 3 else -1):
        versions[p] += 1
        staging = model.stage(p, versions[p], 'update', updates[p])
        assert staging is Staging.STAGED
        claim_and_adopt(model, p, versions[p], merged_round)
        if merged_round < 0 and round_ >= 4:
          model.fetch(captured)
      model.forget(p, round_)
    jax.block_until_ready(model.params)
  assert found == []


TRANSFORMER = TransformerOptions(
  vocab_size=32,
  width=16,
  layers=2,
  heads=4,
  kv_heads=2,
  mlp_width=32,
  sequence_length=8,
  scan_layers=True,
)


def transformer_run(mesh):
  """Three rounds of each fragment; the parameters at the end."""
  task = language_model_task(TRANSFORMER)
  shapes = jax.eval_shape(task.init, RNG)
  plan = fragment(shapes, num_fragments=4)
  trainer = make_train_scan(
    task, optax.sgd(0.1), make_mesh(mesh), steps_per_scan=K
  )
  wire = wire_format(WireOptions(up='bf16', down='bf16'))
  model = LocalModel(plan, trainer, wire=wire, options=RULES['rebase'])
  syncer = GlobalModel(
    plan,
    jax.jit(task.init)(RNG),
    tx=outer_optimizer(0.5, 0.5),
    merge='rda',
    wire=wire,
    num_learners=1,
  )
  for p in range(4):
    model.stage(p, 0, 'value', syncer.value_payload(p))
  claim_and_begin(model, [0] * 4, RNG)
  rng = np.random.default_rng(0)
  for round_ in range(12):
    p, version = round_ % 4, 1 + round_ // 4
    tokens = rng.integers(0, 32, (K, 4, 9), np.int32)
    model.train({'tokens': tokens}, round_ * K)
    payload = model.fetch(model.capture(p, round_))
    merged = syncer.merge(p, {0: 1.0}, {0: payload})
    model.stage(p, version, 'update', merged.payload)
    claim_and_adopt(model, p, version, round_)
    assert_lie_alike(model)
  return model, on_host(model.params)


def test_a_scanned_transformer_on_eight_devices_and_on_one():
  with jax.default_matmul_precision('highest'):
    _, expected = transformer_run(ONE)
    model, params = transformer_run(EIGHT)
  # bfloat16 deltas of about 0.1 at a border between two values may be rounded
  # either way: 0.1 * 2^-8, times the gain of the outer optimizer, 1.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), params, expected
  )
  # Each device has its quarter of a matrix, in the bases as in the parameters.
  for piece, value in zip(model.plan.pieces(0), model.base(0), strict=True):
    if len(piece.shape) == 2:
      assert value.addressable_shards[0].data.size == piece.size // 4


@pytest.mark.parametrize('mesh', [ONE, EIGHT], ids=['one', 'eight'])
@pytest.mark.parametrize('feedback', [False, True])
def test_what_is_kept_lies_as_was_foretold(mesh, feedback):
  """Snapshots are restored, and programs compiled, by what is foretold."""
  wire = wire_format(WireOptions(up_error_feedback=feedback, block_size=8))
  trainer = make_trainer(mesh)
  programs = LearnerPrograms(PLAN, trainer, wire=wire, options=RULES['mix'])
  state = programs.copy(trainer.init_state(RNG))
  bases = [programs.local_copy(state.params, p) for p in range(2)]
  kept = Held(state, bases, programs.first_residuals(bases))
  foretold = programs.abstract()
  assert jax.tree.structure(kept) == jax.tree.structure(foretold)
  assert any(jax.tree.leaves(foretold.residuals)) == feedback
  for leaf, wanted in zip(
    jax.tree.leaves(kept), jax.tree.leaves(foretold), strict=True
  ):
    assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
    assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
