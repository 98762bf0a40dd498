"""Small models of one learner, and what a syncer would send them.

The tiny task's gradient is known: in a scan of K=2 steps every parameter falls
by 2 * PULL times its entry of a ramp of integers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.ops.pieces import named_leaves
from decoupled_diloco.runtime.local_model import LocalModel, Staging
from decoupled_diloco.tasks import jax_task
from decoupled_diloco.training.mesh import MeshOptions, make_mesh
from decoupled_diloco.training.step import make_train_scan
from decoupled_diloco.training.wire_format import (
  WireOptions,
  wire_format,
  wire_shapes,
)

K = 2
PULL = 0.25
RNG = jax.random.key(0)
ONE, EIGHT = MeshOptions(), MeshOptions(2, 2, 2)
EXACT = WireOptions(up='f32', down='f32', down_error_feedback=False)
INT4 = WireOptions(block_size=8)
RULES = {
  'overwrite': AdoptOptions('overwrite'),
  'mix': AdoptOptions('mix', 0.3),
  'rebase': AdoptOptions('rebase'),
}
SHAPES = {
  'embed': jax.ShapeDtypeStruct((8, 4), jnp.float32),
  'layers': {'w': jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)},
  'out': jax.ShapeDtypeStruct((4,), jnp.float32),
}
PLAN = fragment(SHAPES, num_fragments=2)


def claim_and_adopt(
  model: LocalModel, p: int, version: int, merged_round: int
) -> None:
  """What the loop does with an `Adopt`."""
  model.claim(p, version)
  model.adopt(p, version, merged_round)


def claim_and_begin(
  model: LocalModel, versions: list[int], rng: jax.Array
) -> None:
  """What the loop does with the first `Adopt` of every fragment."""
  for p, version in enumerate(versions):
    model.claim(p, version)
  model.begin(versions, rng)


def ramp(shape):
  return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 3


def tiny_task(dtype=jnp.float32):
  def init(rng):
    del rng
    return jax.tree.map(lambda s: jnp.ones(s.shape, dtype), SHAPES)

  def loss(params, batch, rng):
    del rng
    pulls = jax.tree.map(
      lambda x: jnp.sum(x.astype(jnp.float32) * ramp(x.shape)), params
    )
    return jnp.mean(batch) * jnp.sum(jnp.stack(jax.tree.leaves(pulls)))

  return jax_task(init, loss)


BATCHES = np.full((K, 8), PULL, np.float32)


@functools.cache
def make_trainer(mesh=ONE, dtype=jnp.float32, tx=optax.sgd):
  return make_train_scan(
    tiny_task(dtype), tx(1.0), make_mesh(mesh), steps_per_scan=K
  )


def make_model(
  wire=EXACT, rule='overwrite', *, trainer=None, begin=True, plan=PLAN
):
  trainer = make_trainer() if trainer is None else trainer
  model = LocalModel(plan, trainer, wire=wire_format(wire), options=RULES[rule])
  for p in range(PLAN.num_fragments):
    stage_value(model, p, 0, initial_values(p), wire)
  if begin:
    claim_and_begin(model, [0] * PLAN.num_fragments, RNG)
  return model


def initial_values(p, seed=0):
  """Integers: between them and eighths all arithmetic here is exact."""
  rng = np.random.default_rng([seed, p])
  return tuple(
    rng.integers(-20, 20, shape.shape).astype(np.float32)
    for shape in PLAN.shapes(p)
  )


def payload_of(codec, values):
  values = tuple(map(jnp.asarray, values))
  return payloads.to_bytes(codec.encode(values, codec.init(values))[0])


def stage_value(model, p, version, values, wire=EXACT):
  payload = payload_of(wire_format(wire).value, values)
  assert model.stage(p, version, 'value', payload) is Staging.STAGED


def stage_update(model, p, version, updates, wire=EXACT):
  payload = payload_of(wire_format(wire).down, updates)
  return model.stage(p, version, 'update', payload)


def decoded(payload, p, wire):
  """What the syncer sees of a hand-over."""
  up = wire_format(wire).up
  return on_host(
    up.decode(payloads.from_bytes(up, wire_shapes(PLAN, p), payload))
  )


def on_host(tree):
  return jax.tree.map(np.array, tree)


def taken(model, p):
  return on_host(PLAN.take(model.params, p))


def pulled(p):
  """What one scan subtracts."""
  pulls = jax.tree.map(lambda s: jnp.asarray(ramp(s.shape)), SHAPES)
  return [K * PULL * np.array(value) for value in PLAN.take(pulls, p)]


def assert_equal(left, right):
  for a, b in zip(left, right, strict=True):
    np.testing.assert_array_equal(a, b)


def bytes_per_device(array):
  # By its sharding: looking at its shards would make arrays of them.
  shard = array.sharding.shard_shape(array.shape)
  return int(np.prod(shard)) * array.dtype.itemsize


def assert_lie_alike(model):
  """The bases take no more of any device than the parameters do."""

  def per_device(tree):
    return sum(map(bytes_per_device, jax.tree.leaves(tree)))

  bases = [model.base(p) for p in range(model.plan.num_fragments)]
  devices = set(model.trainer.mesh.devices.flat)
  assert all(b.sharding.device_set == devices for b in jax.tree.leaves(bases))
  assert per_device(bases) == per_device(model.params)
  wanted = named_leaves(model.trainer.state_shardings.params)
  for name, leaf in named_leaves(model.params).items():
    assert leaf.sharding == wanted[name]
