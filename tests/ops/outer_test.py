"""Tests of the outer optimizer, fragment by fragment and as a whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.ops.merge import radial_directional, weighted_mean
from decoupled_diloco.ops.outer import (
  fragment_outer,
  from_gain,
  outer_optimizer,
  outer_transform,
  suited_gain,
  suited_momentum,
)

LEARNERS = 3


def make_params(dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = {
    'embed': (6, 2),
    'layers': {'w': (4, 3, 3), 'b': (4, 3)},
    'out': (3, 2),
  }
  return jax.tree.map(
    lambda shape: jnp.asarray(rng.standard_normal(shape), dtype),
    shapes,
    is_leaf=lambda node: isinstance(node, tuple),
  )


def make_deltas(params, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: jnp.asarray(
      rng.standard_normal((LEARNERS, *leaf.shape)), leaf.dtype
    ),
    params,
  )


def assert_trees_close(one, other, **tolerance):
  jax.tree.map(
    lambda a, b: assert_allclose(np.float32(a), np.float32(b), **tolerance),
    one,
    other,
  )


def test_the_first_nesterov_step():
  # The buffer is delta; Nesterov looks ahead: delta + mu * delta.
  tx = outer_optimizer(learning_rate=0.5, momentum=0.8)
  params: Any = jnp.array(10.0)
  updates, _ = tx.update(jnp.array(3.0), tx.init(params))
  params = optax.apply_updates(params, updates)
  assert_allclose(params, 10 - 0.5 * (1 + 0.8) * 3, rtol=1e-6)


@pytest.mark.parametrize('momentum', [None, 0, 0.0])
def test_without_momentum_there_is_no_buffer(momentum):
  tx = outer_optimizer(learning_rate=0.5, momentum=momentum)
  state = tx.init(jnp.array(10.0))
  assert jax.tree.leaves(state) == []
  assert_array_equal(tx.update(jnp.array(3.0), state)[0], -1.5)


def test_gain_is_how_far_a_persistent_delta_carries():
  tx = from_gain(2.5, momentum=0.8, nesterov=False)
  params: Any = jnp.array(0.0)
  state = tx.init(params)
  for delta in [1.0] + [0.0] * 200:
    updates, state = tx.update(jnp.array(delta), state)
    params = optax.apply_updates(params, updates)
  # The sum of lr * mu^k over k is lr / (1 - mu).
  assert_allclose(params, -2.5, rtol=1e-5)


@pytest.mark.parametrize(
  ('merge', 'embedding_merge'),
  [('rda', 'mean'), ('rda', 'rda'), ('mean', 'mean'), ('mean', 'rda')],
)
def test_rounds_of_fragments_equal_nesterov_on_the_merged_deltas(
  merge, embedding_merge
):
  params = make_params()
  plan = fragment(params, 4)
  outer = outer_transform(
    outer_optimizer(0.4, 0.9), merge, plan, embedding_merge
  )
  update = jax.jit(outer.update, static_argnames='fragment')
  state = outer.init(params)

  reference = optax.sgd(0.4, momentum=0.9, nesterov=True)
  values: list[Any] = [plan.take(params, p) for p in range(4)]
  states = [reference.init(v) for v in values]
  weights = jnp.array([1.0, 0.0, 2.5])
  for t in range(24):
    p = (3 * t) % 4  # Not in order.
    deltas = make_deltas(params, t)
    deltas = jax.tree.map(lambda d: d.at[1].set(jnp.nan), deltas)
    updates, state = update(deltas, state, params, weights=weights, fragment=p)
    params = optax.apply_updates(params, updates)

    stacked = plan.take_stacked(deltas, p)
    rules = {'mean': weighted_mean, 'rda': radial_directional}
    rule = rules[embedding_merge if p == 3 else merge]
    assert plan.is_embedding(p) == (p == 3)
    steps, states[p] = reference.update(rule(stacked, weights), states[p])
    values[p] = optax.apply_updates(values[p], steps)
  for p in range(4):
    assert_trees_close(plan.take(params, p), values[p], rtol=1e-5, atol=1e-5)


def test_a_fragment_leaves_the_others_alone():
  params = make_params()
  plan = fragment(params, 4)
  outer = outer_transform(outer_optimizer(), merge='rda', plan=plan)
  before: Any = outer.init(params)
  updates: Any
  after: Any
  updates, after = outer.update(
    make_deltas(params, 0), before, params, weights=jnp.ones(3), fragment=2
  )
  for p in range(4):
    moved = [bool((u != 0).any()) for u in plan.take(updates, p)]
    assert all(moved) if p == 2 else not any(moved)
    if p != 2:
      assert_trees_close(after.fragments[p], before.fragments[p])


def test_all_fragments_at_once_equal_one_after_the_other():
  params = make_params()
  plan = fragment(params, 4)
  outer = outer_transform(outer_optimizer(), merge='rda', plan=plan)
  deltas, weights = make_deltas(params, 0), jnp.array([1.0, 2.0, 3.0])
  updates, state = outer.update(
    deltas, outer.init(params), params, weights=weights
  )
  one_state, total = outer.init(params), jax.tree.map(jnp.zeros_like, params)
  for p in range(4):
    one, one_state = outer.update(
      deltas, one_state, params, weights=weights, fragment=p
    )
    total = jax.tree.map(jnp.add, total, one)
  assert_trees_close(updates, total)
  assert_trees_close(state, one_state)


def test_scanned_and_unrolled_models_move_alike():
  params = make_params()
  layers = range(4)

  def unroll(tree, axis):
    parts = [
      jax.tree.map(lambda x, i=i: jnp.take(x, i, axis), tree['layers'])
      for i in layers
    ]
    return {**tree, 'layers': parts}

  deltas, results = make_deltas(params, 0), []
  for p, d in [(params, deltas), (unroll(params, 0), unroll(deltas, 1))]:
    outer = outer_transform(outer_optimizer(), 'rda', fragment(p, 4))
    updates, _ = outer.update(d, outer.init(p), p, weights=jnp.ones(3))
    results.append(updates)
  assert_trees_close(unroll(results[0], 0), results[1], rtol=1e-6)


@pytest.mark.parametrize('tx', [outer_optimizer(), optax.adam(0.1)])
@jax.numpy_dtype_promotion('standard')  # Adam in optax promotes its count.
def test_when_nobody_is_there_nothing_changes(tx):
  params = make_params()
  outer = outer_transform(tx, merge='rda', plan=fragment(params, 4))
  update = jax.jit(outer.update)
  deltas = make_deltas(params, 0)
  _, state = update(deltas, outer.init(params), params, weights=jnp.ones(3))
  nan = jax.tree.map(lambda d: d * jnp.nan, deltas)
  updates, after = update(nan, state, params, weights=jnp.zeros(3))
  assert_trees_close(updates, jax.tree.map(jnp.zeros_like, params))
  assert_trees_close(after, state)


@pytest.mark.parametrize('tx', [optax.adam(0.1), optax.adamw(0.1)])
@jax.numpy_dtype_promotion('standard')  # Adam in optax promotes its count.
def test_any_optax_optimizer_will_do(tx):
  params = make_params()
  plan = fragment(params, 1)  # One fragment, embeddings and all.
  outer = outer_transform(tx, merge='mean', plan=plan)
  state, reference_state = outer.init(params), tx.init(params)
  reference = params
  for t in range(3):
    deltas, weights = make_deltas(params, t), jnp.array([1.0, 2.0, 3.0])
    updates, state = outer.update(
      deltas, state, params, weights=weights, fragment=0
    )
    params = optax.apply_updates(params, updates)
    steps, reference_state = tx.update(
      weighted_mean(deltas, weights), reference_state, reference
    )
    reference = optax.apply_updates(reference, steps)
  assert_trees_close(params, reference, rtol=1e-5)


def test_a_single_fragment_merges_embeddings_by_the_mean():
  params = {'embed': jnp.zeros(2), 'w': jnp.zeros(2)}
  outer = outer_transform(optax.sgd(1.0), 'rda', fragment(params, 1))
  orthogonal = jnp.array([[2.0, 0.0], [0.0, 2.0]])
  updates: Any
  updates, _ = outer.update(
    {'embed': orthogonal, 'w': orthogonal},
    outer.init(params),
    params,
    weights=jnp.ones(2),
  )
  assert_allclose(updates['embed'], [-1.0, -1.0])
  assert_allclose(updates['w'], [-(2**0.5)] * 2, rtol=1e-6)


def test_the_state_of_low_precision_parameters_is_float32():
  params = make_params(jnp.bfloat16)
  outer = outer_transform(outer_optimizer(), 'rda', fragment(params, 4))
  state = outer.init(params)
  for t in range(2):
    updates, state = outer.update(
      make_deltas(params, t), state, params, weights=jnp.ones(3)
    )
    params = optax.apply_updates(params, updates)
  assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {
    jnp.dtype(jnp.float32)
  }
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
    jnp.dtype(jnp.bfloat16)
  }


def test_tied_leaves_are_updated_once_and_alike():
  table = jnp.ones((2, 2))
  params = {'embed': table, 'head': table}
  outer = outer_transform(optax.sgd(1.0), 'mean', fragment(params, 1))
  deltas = jax.tree.map(lambda leaf: jnp.ones((1, *leaf.shape)), params)
  updates: Any
  updates, _ = outer.update(
    deltas, outer.init(params), params, weights=jnp.ones(1)
  )
  assert_array_equal(updates['embed'], -np.ones((2, 2)))
  assert_array_equal(updates['head'], -np.ones((2, 2)))


@pytest.mark.parametrize(
  ('outer_steps', 'momentum', 'gain'),
  [
    (0, 0.0, 0.9),
    (8, 0.0, 0.9),
    (64, 0.75, 0.9 / (1 - 0.5625)),  # 64^(2/3) / 4 = 4
    (10_000, 0.9, 0.9 / 0.19),
    (np.inf, 0.9, 0.9 / 0.19),
  ],
)
def test_what_suits_a_number_of_outer_steps(outer_steps, momentum, gain):
  found = suited_momentum(outer_steps)
  assert found == pytest.approx(momentum)
  assert suited_gain(found) == pytest.approx(gain)


@pytest.mark.parametrize('momentum', [0.0, 0.5, 0.9])
def test_the_suited_gain_does_not_overshoot_where_learners_settle(momentum):
  tx = from_gain(suited_gain(momentum), momentum)
  value: Any = jnp.array(1.0)
  state = tx.init(value)
  for step in range(200):
    # Learners end at 0, so that the delta is the value itself.
    updates, state = tx.update(value, state)
    value = optax.apply_updates(value, updates)
    if step == 0:
      assert float(value) == pytest.approx(0.1)
  assert abs(float(value)) < 1e-3


def test_the_syncer_gets_the_merged_delta_too():
  params = make_params()
  plan = fragment(params, 4)
  step = fragment_outer(optax.sgd(0.5), 'rda', plan, 0)
  values = plan.take(params, 0)
  stacked = plan.take_stacked(make_deltas(params, 0), 0)
  weights = jnp.array([1.0, 2.0, 0.0])
  updates, _, merged = jax.jit(step.update)(
    stacked, step.init(values), values, weights
  )
  assert_trees_close(merged, radial_directional(stacked, weights), rtol=1e-5)
  assert_trees_close(updates, tuple(-0.5 * m for m in merged), rtol=1e-6)


def test_errors_give_rule_value_and_fix():
  params = make_params()
  plan = fragment(params, 4)
  with pytest.raises(ValueError, match="merge='median' must be one of"):
    outer_transform(optax.sgd(1.0), 'median', plan)
  with pytest.raises(ValueError, match='embedding_merge'):
    outer_transform(optax.sgd(1.0), 'rda', plan, 'median')
  with pytest.raises(ValueError, match=r'learning_rate=-1\.0'):
    outer_optimizer(learning_rate=-1.0)
  with pytest.raises(ValueError, match=r'momentum=1\.0'):
    outer_optimizer(momentum=1.0)
  with pytest.raises(ValueError, match='gain=0'):
    from_gain(0, 0.9)
  outer = outer_transform(optax.sgd(1.0), 'rda', plan)
  state, deltas = outer.init(params), make_deltas(params, 0)
  with pytest.raises(ValueError, match='Fragment 4 must be one of 0 to 3'):
    outer.update(deltas, state, params, weights=jnp.ones(3), fragment=4)
  with pytest.raises(ValueError, match='needs params'):
    outer.update(deltas, state, weights=jnp.ones(3))
  with pytest.raises(ValueError, match='needs weights'):
    outer.update(deltas, state, params)
