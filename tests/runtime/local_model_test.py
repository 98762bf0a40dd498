"""A learner's arrays, from joining to adoption, on one device and on eight.

The tiny task's gradient is known: in a scan of K=2 steps every parameter falls
by 2 * PULL times its entry of a ramp of integers. All of that is exact in
float32, so the references below are, too.
"""

import contextlib
import functools
import gc

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.ops.outer import outer_optimizer
from decoupled_diloco.ops.pieces import named_leaves
from decoupled_diloco.runtime.local_model import LocalModel, Staging
from decoupled_diloco.tasks import jax_task, language_model_task
from decoupled_diloco.training.global_model import GlobalModel
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


def _adopt(model: LocalModel, p: int, version: int, merged_round: int) -> None:
  """What the loop does with an `Adopt`."""
  model.claim(p, version)
  model.adopt(p, version, merged_round)


def _begin(model: LocalModel, versions: list[int], rng: jax.Array) -> None:
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
    _begin(model, [0] * PLAN.num_fragments, RNG)
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


@contextlib.contextmanager
def compilations():
  """A list of what is compiled meanwhile."""
  found = []

  def listen(event, duration_secs, **_):
    del duration_secs
    if event == '/jax/core/compile/backend_compile_duration':
      found.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield found
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


class Reference:
  """One fragment of a learner, by the formulas of adoption, in numpy."""

  def __init__(self, p, rule, wire):
    self.p, self.rule, self.wire = p, rule, wire
    self.theta = list(initial_values(p))
    self.base = list(self.theta)

  def scan(self):
    self.theta = [
      t - pull for t, pull in zip(self.theta, pulled(self.p), strict=True)
    ]

  def adopt(self, new, seen_delta=None):
    """`seen_delta`: as the syncer saw it, if the hand-over was merged."""
    if self.rule == 'overwrite':
      theta = new
    elif self.rule == 'mix':
      theta = [
        np.float32(0.7) * n + np.float32(0.3) * t
        for n, t in zip(new, self.theta, strict=True)
      ]
    else:
      # All local progress since the base, but for what was merged.
      deltas = seen_delta or [np.zeros_like(b) for b in self.base]
      theta = [
        n + (t - b) + d
        for n, t, b, d in zip(new, self.theta, self.base, deltas, strict=True)
      ]
    self.theta, self.base = list(theta), list(new)


class Pair:
  """A model and its reference, driven alike and compared after every act."""

  def __init__(self, rule, wire, trainer=None):
    self.wire = wire
    self.model = make_model(wire, rule, trainer=trainer)
    self.references = [Reference(p, rule, wire) for p in range(2)]
    self.version = 0

  def scan(self):
    self.model.train(BATCHES, 0)
    for reference in self.references:
      reference.scan()
    self.check()

  def capture(self, round_):
    return self.model.capture(0, round_)

  def encode(self, captured):
    """Returns the delta as the syncer sees it."""
    return decoded(self.model.fetch(captured), 0, self.wire)

  def stage(self):
    self.version += 1
    values = initial_values(0, self.version)
    stage_value(self.model, 0, self.version, values, self.wire)
    return self.version, values

  def adopt(self, staged, merged_round=-1, seen_delta=None):
    version, values = staged
    _adopt(self.model, 0, version, merged_round)
    self.references[0].adopt(values, seen_delta)
    self.check()

  def check(self):
    for p, reference in enumerate(self.references):
      for got, want in zip(taken(self.model, p), reference.theta, strict=True):
        # Scales of int4 are bfloat16, so sums are no longer exact.
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-4)
      assert_equal(self.model.base(p), reference.base)


@pytest.mark.parametrize('mesh', [ONE, EIGHT], ids=['one', 'eight'])
@pytest.mark.parametrize('wire', [EXACT, INT4], ids=['f32', 'int4'])
@pytest.mark.parametrize('rule', RULES)
def test_adoption_is_that_of_the_formulas(rule, wire, mesh):
  pair = Pair(rule, wire, make_trainer(mesh))
  # Merged: the scan after the hand-over is progress that no merge has seen.
  pair.scan()
  seen = pair.encode(pair.capture(0))
  if wire is EXACT:
    assert_equal(seen, pulled(0))  # global - local
  pair.scan()
  pair.adopt(pair.stage(), merged_round=0, seen_delta=seen)
  # Not merged: refused, late or lost.
  pair.scan()
  pair.encode(pair.capture(2))
  pair.model.forget(0, 1)  # An older round is not this one.
  pair.model.forget(0, 2)
  pair.scan()
  pair.adopt(pair.stage())
  # In flight while older publications are adopted, and merged after them.
  pair.scan()
  seen = pair.encode(pair.capture(4))
  pair.adopt(pair.stage())
  pair.scan()
  pair.adopt(pair.stage())
  pair.scan()
  pair.adopt(pair.stage(), merged_round=4, seen_delta=seen)
  # The same, where it is fetched only after the older one is adopted.
  pair.scan()
  captured = pair.capture(6)
  pair.adopt(pair.stage())
  seen = pair.encode(captured)
  pair.scan()
  pair.adopt(pair.stage(), merged_round=6, seen_delta=seen)
  # Two staged at once: adopted one after the other, then only the newer.
  pair.scan()
  for staged in [pair.stage(), pair.stage()]:
    pair.adopt(staged)
  pair.scan()
  pair.stage()
  pair.adopt(pair.stage())


@pytest.mark.parametrize('is_merged', [True, False])
def test_error_feedback_only_of_what_was_merged(is_merged):
  """Nothing was left out of a hand-over that was never merged."""
  wire = WireOptions(up='int4', up_error_feedback=True, block_size=8)
  up = wire_format(wire).up
  model = make_model(wire)
  cstate = up.init(PLAN.shapes(0))
  for round_ in range(4):
    version = round_ + 1
    model.train(BATCHES, 0)
    local, base = taken(model, 0), on_host(model.base(0))
    delta = tuple(map(jnp.asarray, jax.tree.map(np.subtract, base, local)))
    expected, residual = up.encode(delta, cstate)
    captured = model.capture(0, round_)
    assert model.fetch(captured) == payloads.to_bytes(expected)
    if round_ == 0:
      # What is left out depends on this: something is.
      assert any(np.any(leaf) for leaf in jax.tree.leaves(residual))
    stage_value(model, 0, version, initial_values(0, version))
    if is_merged or round_ == 2:
      cstate = residual
      _adopt(model, 0, version, round_)
    else:
      model.forget(0, round_)
      _adopt(model, 0, version, -1)


@pytest.mark.parametrize('mesh', [ONE, EIGHT], ids=['one', 'eight'])
def test_what_is_captured_survives_donated_scans(mesh):
  model = make_model(trainer=make_trainer(mesh))
  model.train(BATCHES, 0)
  held = [model.capture(p, p) for p in range(2)]
  copies = [model.fetch(captured) for captured in held]
  params = jax.tree.leaves(model.params)
  for round_ in range(3):
    model.train(BATCHES, 0)
    for p in range(2):
      stage_value(model, p, 1 + round_, initial_values(p, 9))
      _adopt(model, p, 1 + round_, -1)
  # The scans did write over what they were given.
  assert all(leaf.is_deleted() for leaf in params)
  assert [model.fetch(captured) for captured in held] == copies


def bytes_per_device(array):
  # By its sharding: looking at its shards would make arrays of them.
  shard = array.sharding.shard_shape(array.shape)
  return int(np.prod(shard)) * array.dtype.itemsize


def num_bytes(arrays):
  """Bytes, summed over the devices that hold a part or a copy."""
  return sum(
    bytes_per_device(array) * len(array.sharding.device_set)
    for array in jax.tree.leaves(arrays)
  )


def live_bytes():
  gc.collect()
  return num_bytes(jax.live_arrays())


@pytest.mark.parametrize('mesh', [ONE, EIGHT], ids=['one', 'eight'])
@pytest.mark.parametrize('rule', ['overwrite', 'rebase'])
def test_nothing_is_kept_but_the_state_and_the_base(rule, mesh):
  """Once nothing is in flight; and while it is, one fragment more at most."""
  trainer = make_trainer(mesh, tx=optax.adam)
  before = live_bytes()
  model = make_model(INT4, rule, trainer=trainer)
  params = num_bytes(model.params)
  # Adam has two moments; counters and keys take a few bytes per device.
  expected = 3 * params + num_bytes([model.base(p) for p in range(2)])
  fragments = [num_bytes(model.base(p)) for p in range(2)]
  used = []
  for round_ in range(6):
    p, version = round_ % 2, 1 + round_ // 2
    model.train(BATCHES, 0)
    model.fetch(model.capture(p, round_))
    kept = live_bytes() - before - expected
    assert kept <= (fragments[p] if rule == 'rebase' else 0) + 32 * 8
    updates = [0.01 * np.ones_like(value) for value in initial_values(p)]
    assert stage_update(model, p, version, updates, INT4) is Staging.STAGED
    _adopt(model, p, version, round_ if round_ % 3 else -1)
    if not round_ % 3:
      model.forget(p, round_)
    used.append(live_bytes() - before)
  assert len(set(used)) == 1
  assert expected <= used[0] <= expected + 32 * 8


def test_staging():
  model = make_model()
  ones = [np.ones_like(value) for value in initial_values(0)]
  assert stage_update(model, 0, 2, ones) is Staging.GAP
  assert stage_update(model, 0, 1, ones) is Staging.STAGED
  assert stage_update(model, 0, 1, ones) is Staging.OLD  # A copy.
  assert stage_update(model, 0, 2, ones) is Staging.STAGED  # On top of that.
  assert stage_update(model, 0, 4, ones) is Staging.GAP
  stage_value(model, 0, 7, initial_values(0, 5))  # A value closes any gap.
  assert stage_update(model, 0, 7, ones) is Staging.OLD
  _adopt(model, 0, 2, -1)
  assert_equal(model.base(0), [value + 2 for value in initial_values(0)])
  _adopt(model, 0, 7, -1)
  assert_equal(model.base(0), initial_values(0, 5))
  assert stage_update(model, 0, 7, ones) is Staging.OLD
  assert stage_update(model, 0, 8, ones) is Staging.STAGED
  # Other fragments are where they were.
  assert_equal(model.base(1), initial_values(1))
  assert stage_update(model, 1, 2, [np.ones((8, 4), np.float32)]) is Staging.GAP


def test_a_learner_without_the_version_before_lacks_it():
  model = LocalModel(
    PLAN, make_trainer(), wire=wire_format(EXACT), options=RULES['overwrite']
  )
  ones = [np.ones_like(value) for value in initial_values(0)]
  assert stage_update(model, 0, 0, ones) is Staging.GAP


@pytest.mark.parametrize('form', ['update', 'value'])
def test_payloads_of_another_length_are_refused(form):
  model = make_model()
  with pytest.raises(ValueError, match=r'expected \d+ bytes .* got 3;'):
    model.stage(0, 1, form, b'abc')
  # Nothing is staged, and the right one can still come.
  assert stage_update(model, 0, 1, initial_values(0)) is Staging.STAGED


@pytest.mark.parametrize('mesh', [ONE, EIGHT], ids=['one', 'eight'])
def test_versions_that_come_before_the_beginning(mesh):
  """While the learner compiles, the others go on."""
  model = make_model(begin=False, trainer=make_trainer(mesh))
  ones = [np.ones_like(value) for value in initial_values(0)]
  for version in (1, 2):
    assert stage_update(model, 0, version, ones) is Staging.STAGED
  _begin(model, [1, 0], RNG)
  assert_equal(taken(model, 0), [value + 1 for value in initial_values(0)])
  assert_equal(taken(model, 1), initial_values(1))
  assert stage_update(model, 0, 3, ones) is Staging.STAGED
  for version in (2, 3):
    _adopt(model, 0, version, -1)
    assert_equal(
      model.base(0), [value + version for value in initial_values(0)]
    )
    assert_lie_alike(model)
  model.train(BATCHES, 0)


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
  _begin(model, [1, 1], RNG)
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
        _adopt(model, p, versions[p], merged_round)
        if merged_round < 0 and round_ >= 4:
          model.fetch(captured)
      model.forget(p, round_)
    jax.block_until_ready(model.params)
  assert found == []


@pytest.mark.parametrize(
  'wire',
  [EXACT, INT4, WireOptions(down='bf16', block_size=8)],
  ids=lambda wire: wire.down,
)
@pytest.mark.parametrize('mesh', [ONE, EIGHT], ids=['one', 'eight'])
def test_learners_hold_the_bits_of_the_syncer(wire, mesh):
  formats = wire_format(wire)
  model = make_model(wire, trainer=make_trainer(mesh), begin=False)
  syncer = GlobalModel(
    PLAN,
    tiny_task().init(RNG),
    tx=outer_optimizer(0.3, 0.9),
    merge='rda',
    wire=formats,
    num_learners=2,
  )
  for p in range(2):
    assert model.stage(p, 1, 'value', syncer.value_payload(p)) is Staging.STAGED
  _begin(model, [1, 1], RNG)
  for round_ in range(12):
    p = round_ % 2
    model.train(BATCHES, 0)
    payload = model.fetch(model.capture(p, round_))
    merged = syncer.merge(p, {1: 1.0}, {1: payload})
    version = 2 + round_ // 2
    staging = model.stage(p, version, 'update', merged.payload)
    assert staging is Staging.STAGED
    _adopt(model, p, version, round_)
    held = payload_of(formats.value, model.base(p))
    assert held == syncer.value_payload(p)
    assert_equal(taken(model, p), model.base(p))


@pytest.mark.parametrize('rule', RULES)
def test_coarser_parameters_than_the_wire(rule):
  """Their rounding is no progress, and their bases lose nothing to it."""
  trainer = make_trainer(dtype=jnp.bfloat16)
  coarse = jax.eval_shape(trainer.task.init, RNG)
  plan = fragment(coarse, num_fragments=2)
  model = make_model(EXACT, rule, trainer=trainer, plan=plan)
  model.compile(BATCHES)
  start = [1 + value / 1000 for value in initial_values(0)]
  stage_value(model, 0, 1, start)
  # As if nothing had been done since: 'mix' and 'rebase' keep local progress.
  stage_value(model, 0, 2, start)
  _adopt(model, 0, 1, -1)
  if rule == 'overwrite':
    delta = decoded(model.fetch(model.capture(0, 0)), 0, EXACT)
    assert_equal(delta, [np.zeros_like(value) for value in start])
  # 1e-4 is below what bfloat16 can add to 1, and adds up in the base.
  small = [np.full_like(value, 1e-4) for value in start]
  for version in range(2, 22):
    if version > 2:
      assert stage_update(model, 0, version, small) is Staging.STAGED
    _adopt(model, 0, version, -1)
  for got, want in zip(model.base(0), start, strict=True):
    np.testing.assert_allclose(got, want + 19e-4, rtol=1e-6)
  if rule == 'overwrite':
    for got, base in zip(
      PLAN.take(model.params, 0), model.base(0), strict=True
    ):
      np.testing.assert_array_equal(got, base.astype(jnp.bfloat16))
  model.train(BATCHES, 0)
  model.fetch(model.capture(0, 3))


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
  _begin(model, [0] * 4, RNG)
  rng = np.random.default_rng(0)
  for round_ in range(12):
    p, version = round_ % 4, 1 + round_ // 4
    tokens = rng.integers(0, 32, (K, 4, 9), np.int32)
    model.train({'tokens': tokens}, round_ * K)
    payload = model.fetch(model.capture(p, round_))
    merged = syncer.merge(p, {0: 1.0}, {0: payload})
    model.stage(p, version, 'update', merged.payload)
    _adopt(model, p, version, round_)
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
