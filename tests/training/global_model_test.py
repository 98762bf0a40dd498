"""The syncer's arrays: what is merged, published, and held by everybody."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.ops.merge import merge_pieces
from decoupled_diloco.ops.outer import fragment_outer, outer_optimizer
from decoupled_diloco.training.global_model import GlobalModel, OuterOptions
from decoupled_diloco.training.wire_format import (
  WireOptions,
  apply_update,
  wire_format,
)
from tests.training.compilations import compilations
from tests.training.global_models import (
  BF16_VALUE,
  EXACT,
  PLAN,
  UPDATES,
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


@pytest.mark.parametrize('wire', [EXACT, WireOptions(block_size=8)])
@pytest.mark.parametrize('merge', ['rda', 'mean'])
def test_a_merge_is_that_of_the_ops(wire, merge):
  model = make_model(wire, merge=merge)
  formats = wire_format(wire)
  for p in range(P):
    before = value_of(model, p)
    given = {m: payload_of(random_delta(p, m), wire) for m in range(M)}
    weights = {m: 1.0 + m for m in range(M)}
    merged = model.merge(p, weights, given)

    @jax.jit
    def expect(encoded, before, weights, p=p):
      decoded = [formats.up.decode(one) for one in encoded]
      stacked = tuple(map(jnp.stack, zip(*decoded, strict=True)))
      rules = [
        'mean' if piece.is_embedding else merge for piece in PLAN.pieces(p)
      ]
      outer = fragment_outer(outer_optimizer(0.3, 0.9), merge, PLAN, p)
      updates, _, _ = outer.update(stacked, outer.init(before), before, weights)
      published, _ = formats.down.encode(updates, formats.down.init(updates))
      delta = merge_pieces(stacked, weights, rules)
      return apply_update(formats, before, published), optax.tree.norm(delta)

    expected, norm = expect(
      [received(formats.up, p, given[m]) for m in range(M)],
      before,
      jnp.asarray([1.0, 2.0, 3.0, 4.0]),
    )
    for got, want in zip(value_of(model, p), expected, strict=True):
      # A value at the border of two levels may be rounded either way: none is
      # for these contributions.
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert merged.norm == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize(
  'wire', UPDATES, ids=lambda w: f'{w.down}-{w.down_error_feedback}'
)
def test_everybody_holds_the_same_bits(wire):
  """A learner that was there, one that joined, one that is compiled otherwise.

  Rounding that differs once is never corrected when updates are sent, so it
  must not differ at all.
  """
  model = make_model(wire)
  formats = wire_format(wire)
  plainly = jax.jit(lambda base, encoded: apply_update(formats, base, encoded))

  @jax.jit
  def fused(base, encoded):
    # What a compiler may contract, reorder and share with its surroundings.
    update = formats.down.decode(encoded)
    new = optax.apply_updates(base, update)
    moved = jax.tree.map(lambda n, b, u: (n - b) * 3.0 - u, new, base, update)
    return new, optax.tree.norm(moved)

  held = [value_of(model, p, wire) for p in range(P)]
  held_otherwise = list(held)
  joiner = None
  for round_ in range(15):
    if round_ == 6:
      joiner = [value_of(model, p, wire) for p in range(P)]
    for p in range(P):
      weights = {m: 1.0 + m for m in range(M) if (round_ + m) % 3}
      given = {m: random_delta(p, 9 * round_ + m) for m in weights}
      published = model.merge(
        p, weights, {m: payload_of(delta) for m, delta in given.items()}
      ).payload
      encoded = received(formats.down, p, published)
      held[p] = plainly(held[p], encoded)
      held_otherwise[p], _ = fused(held_otherwise[p], encoded)
      if joiner is not None:
        joiner[p] = plainly(joiner[p], encoded)
  for p in range(P):
    expected = value_of(model, p, wire)
    assert_same_bits(held[p], expected)
    assert_same_bits(held_otherwise[p], expected)
    assert joiner is not None
    assert_same_bits(joiner[p], expected)


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


@pytest.mark.parametrize(
  'wire',
  [WireOptions(block_size=8), EXACT, BF16_VALUE],
  ids=['int4', 'f32', 'value'],
)
def test_compiling_changes_nothing(wire):
  """Whenever it is done: values, momentum and residuals stay as they are."""
  # Adding an update of zero would make 0 of -0.
  params = jax.tree.map(lambda x: x.at[...].set(-0.0), make_params())
  model, other = (make_model(wire, params=params) for _ in range(2))
  for round_ in range(6):
    for p in range(P):
      if round_ in (0, 3):
        model.compile(p)
      assert model.value_payload(p) == other.value_payload(p)
      delta = random_delta(p, round_)
      published = [merge_one(m, p, delta, wire).payload for m in (model, other)]
      assert published[0] == published[1]


def test_values_can_be_had_while_the_merge_is_compiled():
  """A learner may join in the first seconds of a run."""
  model = make_model()
  expected = model.value_payload(0)
  thread = threading.Thread(target=model.compile, args=(0,))
  thread.start()
  while thread.is_alive():
    assert model.value_payload(0) == expected
  thread.join()


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


@pytest.mark.parametrize(
  'wire', [WireOptions(), BF16_VALUE], ids=['update', 'value']
)
def test_rounds_compile_nothing(wire):
  model = make_model(wire)
  given = [
    [payload_of(random_delta(p, m), wire) for m in range(M)] for p in range(P)
  ]
  for p in range(P):
    model.compile(p)
  with compilations() as found:
    for round_ in range(12):
      p = round_ % P
      contributors = [m for m in range(M) if (round_ + 1) >> m & 1] or [0]
      for m in contributors:
        model.norm_of(p, given[p][m])
      weights = {m: 1.0 + round_ for m in contributors}
      model.merge(p, weights, {m: given[p][m] for m in contributors})
      model.value_payload(p)
  assert found == []


@pytest.mark.parametrize(
  ('options', 'gain', 'momentum'),
  [
    (OuterOptions(), 0.9 / (1 - 0.75**2), 0.75),
    (OuterOptions(gain=2.0), 2.0, 0.75),
    (OuterOptions(momentum=0.5), 1.2, 0.5),
    (OuterOptions(gain=2.0, momentum=0.5), 2.0, 0.5),
  ],
)
def test_what_is_not_given_follows_from_the_runs_length(
  options, gain, momentum
):
  tx = options.optimizer(outer_steps=64)
  updates, _ = tx.update(jnp.array(1.0), tx.init(jnp.array(1.0)))
  learning_rate = gain * (1 - momentum)
  assert float(updates) == pytest.approx(-learning_rate * (1 + momentum))


def test_options_check_themselves():
  with pytest.raises(ValueError, match='gain=0'):
    OuterOptions(gain=0.0)
  with pytest.raises(ValueError, match='momentum=1'):
    OuterOptions(momentum=1.0)
  with pytest.raises(ValueError, match="merge='median' must be one of"):
    OuterOptions(merge='median')
