"""The syncer's arrays: what is merged, published, and held by everybody."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.ops.outer import outer_optimizer
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.wire_format import (
  WireOptions,
  wire_format,
)
from tests.training.global_models import (
  BF16_VALUE,
  EXACT,
  PLAN,
  M,
  P,
  assert_same_bits,
  make_model,
  make_params,
  merge_one,
  payload_of,
  random_delta,
  received,
  value_of,
)


def test_the_first_step_by_hand():
  """p - lr (1 + mu) delta = 1 - 0.25 * 1.5 * 0.5 = 0.8125, exactly."""
  model = GlobalModel(
    PLAN,
    jax.tree.map(jnp.ones_like, make_params()),
    tx=outer_optimizer(0.25, 0.5),
    merge='mean',
    wire=wire_format(EXACT),
    num_learners=M,
  )
  for p in range(P):
    delta = tuple(jnp.full(s.shape, 0.5) for s in PLAN.shapes(p))
    merged = merge_one(model, p, delta)
    # Each of the fragment's elements adds 0.5^2.
    assert merged.norm == pytest.approx(0.5 * PLAN.sizes[p] ** 0.5)
  for leaf in jax.tree.leaves(model.params(make_params())):
    np.testing.assert_array_equal(leaf, np.float32(0.8125))


def test_many_rounds_are_those_of_optax():
  """By fragment, unequally often: each has its own momentum."""
  model = make_model(merge='mean')
  tx = optax.sgd(0.3, 0.9, nesterov=True)
  expected = [value_of(model, p) for p in range(P)]
  states = [tx.init(values) for values in expected]
  for round_ in range(40):
    p = round_ % P if round_ < 20 else 0
    deltas = [random_delta(p, 10 * round_ + m) for m in range(2)]
    weights = {0: 1.0, 3: 3.0}
    model.merge(
      p,
      weights,
      {m: payload_of(d) for m, d in zip(weights, deltas, strict=True)},
    )
    mean = jax.tree.map(lambda a, b: (a + 3 * b) / 4, *deltas)
    updates, states[p] = tx.update(mean, states[p])
    expected[p] = optax.apply_updates(expected[p], updates)
  for p in range(P):
    for got, want in zip(value_of(model, p), expected[p], strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', ['bf16', 'f32'])
def test_values_are_published_as_joiners_get_them(name):
  wire = WireOptions(
    up='f32', down=name, down_form='value', down_error_feedback=False
  )
  model, exact = make_model(wire), make_model()
  codec = wire_format(wire).value
  # bfloat16 keeps 8 bits, so rounding to it is off by at most 2^-8 of a value.
  tolerance = 2.0**-8 if name == 'bf16' else 1e-6
  for round_ in range(10):
    for p in range(P):
      delta = random_delta(p, round_)
      published = merge_one(model, p, delta).payload
      assert published == model.value_payload(p)
      merge_one(exact, p, delta)
      # What was rounded for the wire does not come back into the values.
      jax.tree.map(
        lambda got, want: np.testing.assert_allclose(
          got, want, rtol=tolerance, atol=1e-6
        ),
        codec.decode(received(codec, p, published)),
        value_of(exact, p),
      )


@pytest.mark.parametrize('wire', [EXACT, BF16_VALUE], ids=['update', 'value'])
def test_small_updates_are_not_swallowed(wire):
  """bfloat16 parameters of 1, and 100 updates of -1e-4: 0.99, not 1."""
  ones = jax.tree.map(jnp.ones_like, make_params(jnp.bfloat16))
  model = GlobalModel(
    fragment(ones, num_fragments=P),
    ones,
    tx=outer_optimizer(1.0, 0.0),
    merge='mean',
    wire=wire_format(wire),
    num_learners=M,
  )
  delta = tuple(jnp.full(shape.shape, 1e-4) for shape in PLAN.shapes(0))
  for _ in range(100):
    merge_one(model, 0, delta)
  for leaf in PLAN.take(model.params(ones), 0):
    assert leaf.dtype == jnp.bfloat16
    np.testing.assert_array_equal(leaf, jnp.bfloat16(0.99))
  for leaf in PLAN.take(model.params(ones), 1):
    np.testing.assert_array_equal(leaf, jnp.bfloat16(1))


def test_absent_learners_do_not_matter():
  """Nor in which order the others are named."""
  given = [payload_of(random_delta(0, m)) for m in range(2)]
  few, many, turned = (make_model(num_learners=n) for n in (2, M, M))
  for _ in range(3):
    few.merge(0, {0: 1.0, 1: 2.0}, dict(enumerate(given)))
    weights = {1: 1.0, 3: 2.0}
    many.merge(0, weights, {1: given[0], 3: given[1]})
    turned.merge(0, dict(reversed(weights.items())), {1: given[0], 3: given[1]})
  assert many.value_payload(0) == turned.value_payload(0)
  for got, want in zip(value_of(many, 0), value_of(few, 0), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_norms_tell_what_is_finite():
  model = make_model()
  shapes = PLAN.shapes(0)
  # 3 in every element: the norm is 3 sqrt(number of elements).
  threes = tuple(jnp.full(shape.shape, 3.0) for shape in shapes)
  norm = model.norm_of(0, payload_of(threes))
  assert norm == pytest.approx(3 * PLAN.sizes[0] ** 0.5)
  models = {
    wire: make_model(wire)
    for wire in (EXACT, WireOptions(up='int4'), WireOptions(up='bf16'))
  }
  for poison in (np.nan, np.inf, -np.inf):
    for wire in models:
      delta = [np.array(value) for value in threes]
      delta[-1].reshape(-1)[-1] = poison
      payload = payload_of(tuple(map(jnp.asarray, delta)), wire)
      assert models[wire].norm_of(0, payload) is None


@pytest.mark.parametrize('wrong', [b'', b'x', bytes(10_000)])
def test_payloads_of_another_length_are_refused(wrong):
  model = make_model()
  before = model.value_payload(0)
  with pytest.raises(ValueError, match=rf'expected \d+ bytes .* {len(wrong)};'):
    model.norm_of(0, wrong)
  with pytest.raises(ValueError, match='one codec, block size'):
    model.merge(0, {0: 1.0}, {0: wrong})
  assert model.value_payload(0) == before
  merge_one(model, 0, random_delta(0, 0))  # It is still of use.


def test_a_merge_that_is_not_finite_ends_the_run():
  model = make_model()
  with pytest.raises(FloatingPointError, match=r'Fragment 1 .* snapshot'):
    merge_one(model, 1, tuple(jnp.full(s.shape, 1e38) for s in PLAN.shapes(1)))
  merge_one(model, 0, random_delta(0, 0))  # Others are untouched.
  assert all(np.all(np.isfinite(value)) for value in value_of(model, 0))


def test_parameters_stay_valid_after_further_merges():
  model = make_model()
  held = model.params(make_params())
  copies = jax.tree.map(np.array, held)
  for p in range(P):
    merge_one(model, p, random_delta(p, 0))
  assert_same_bits(held, copies)
  jax.tree.map(
    lambda old, new: np.testing.assert_(np.all(np.asarray(old) != new)),
    copies,
    model.params(make_params()),
  )


def test_an_update_that_is_not_finite_ends_the_run():
  """lr (1 + mu) delta = 1e38 * 1.9 * 5 exceeds 3.4e38; the delta does not."""
  model = make_model(lr=1e38)
  with pytest.raises(FloatingPointError, match='Fragment 1 is no longer'):
    merge_one(model, 1, tuple(jnp.full(s.shape, 5.0) for s in PLAN.shapes(1)))


def test_the_initial_parameters_are_copied():
  params = make_params()
  model = make_model(params=params)
  for p in range(P):
    merge_one(model, p, random_delta(p, 0))
  assert_same_bits(params, make_params())
