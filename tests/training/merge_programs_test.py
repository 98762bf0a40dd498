"""What is compiled for a merge: to the same bits everywhere, and once."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco.ops.merge import merge_pieces
from decoupled_diloco.ops.outer import fragment_outer, outer_optimizer
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
