"""A learner's arrays, from joining to adoption, on one device and on eight.

All arithmetic of the small models is exact in float32, so the references below
are, too.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.ops.outer import outer_optimizer
from decoupled_diloco.runtime.local_model import LocalModel, Staging
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.wire_format import (
  WireOptions,
  wire_format,
)
from tests.runtime.local_models import (
  BATCHES,
  EIGHT,
  EXACT,
  INT4,
  ONE,
  PLAN,
  RNG,
  RULES,
  assert_equal,
  assert_lie_alike,
  bytes_per_device,
  claim_and_adopt,
  claim_and_begin,
  decoded,
  initial_values,
  make_model,
  make_trainer,
  on_host,
  payload_of,
  pulled,
  stage_update,
  stage_value,
  taken,
  tiny_task,
)


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
    claim_and_adopt(self.model, 0, version, merged_round)
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
      claim_and_adopt(model, 0, version, round_)
    else:
      model.forget(0, round_)
      claim_and_adopt(model, 0, version, -1)


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
      claim_and_adopt(model, p, 1 + round_, -1)
  # The scans did write over what they were given.
  assert all(leaf.is_deleted() for leaf in params)
  assert [model.fetch(captured) for captured in held] == copies


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
    claim_and_adopt(model, p, version, round_ if round_ % 3 else -1)
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
  claim_and_adopt(model, 0, 2, -1)
  assert_equal(model.base(0), [value + 2 for value in initial_values(0)])
  claim_and_adopt(model, 0, 7, -1)
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
  claim_and_begin(model, [1, 0], RNG)
  assert_equal(taken(model, 0), [value + 1 for value in initial_values(0)])
  assert_equal(taken(model, 1), initial_values(1))
  assert stage_update(model, 0, 3, ones) is Staging.STAGED
  for version in (2, 3):
    claim_and_adopt(model, 0, version, -1)
    assert_equal(
      model.base(0), [value + version for value in initial_values(0)]
    )
    assert_lie_alike(model)
  model.train(BATCHES, 0)


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
  claim_and_begin(model, [1, 1], RNG)
  for round_ in range(12):
    p = round_ % 2
    model.train(BATCHES, 0)
    payload = model.fetch(model.capture(p, round_))
    merged = syncer.merge(p, {1: 1.0}, {1: payload})
    version = 2 + round_ // 2
    staging = model.stage(p, version, 'update', merged.payload)
    assert staging is Staging.STAGED
    claim_and_adopt(model, p, version, round_)
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
  claim_and_adopt(model, 0, 1, -1)
  if rule == 'overwrite':
    delta = decoded(model.fetch(model.capture(0, 0)), 0, EXACT)
    assert_equal(delta, [np.zeros_like(value) for value in start])
  # 1e-4 is below what bfloat16 can add to 1, and adds up in the base.
  small = [np.full_like(value, 1e-4) for value in start]
  for version in range(2, 22):
    if version > 2:
      assert stage_update(model, 0, version, small) is Staging.STAGED
    claim_and_adopt(model, 0, version, -1)
  for got, want in zip(model.base(0), start, strict=True):
    np.testing.assert_allclose(got, want + 19e-4, rtol=1e-6)
  if rule == 'overwrite':
    for got, base in zip(
      PLAN.take(model.params, 0), model.base(0), strict=True
    ):
      np.testing.assert_array_equal(got, base.astype(jnp.bfloat16))
  model.train(BATCHES, 0)
  model.fetch(model.capture(0, 3))
