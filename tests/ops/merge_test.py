"""Tests of merge rules, with known answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from decoupled_diloco.ops.merge import (
  merge_pieces,
  pseudo_gradient,
  radial_directional,
  weighted_mean,
)

both_rules = pytest.mark.parametrize(
  'merge', [weighted_mean, radial_directional]
)


def normal(shape, seed=0):
  return jnp.asarray(
    np.random.default_rng(seed).standard_normal(shape), jnp.float32
  )


def test_the_delta_is_global_minus_local():
  delta = pseudo_gradient({'w': jnp.array([3.0])}, {'w': jnp.array([1.0])})
  assert_array_equal(delta['w'], [2.0])


def test_deltas_of_low_precision_parameters_are_float32():
  # 1 - 0.99609375 = 2^-8 is exact in float32.
  delta = pseudo_gradient(
    jnp.ones(1, jnp.bfloat16), jnp.full(1, 1 - 2.0**-8, jnp.bfloat16)
  )
  assert delta.dtype == jnp.float32
  assert_array_equal(delta, [2.0**-8])


def test_weighted_mean():
  # (1 * 2 + 3 * 4) / 4 = 3.5
  merged = weighted_mean(jnp.array([2.0, 4.0]), jnp.array([1.0, 3.0]))
  assert_array_equal(merged, 3.5)


def test_rda_of_orthogonal_deltas_keeps_their_length():
  deltas = jnp.array([[2.0, 0.0], [0.0, 2.0]])
  # Both of length 2; the mean direction is the diagonal. Their mean would have
  # length sqrt(2).
  assert_allclose(
    radial_directional(deltas, jnp.ones(2)), [2**0.5] * 2, rtol=1e-6
  )


def test_rda_weights_lengths_and_directions():
  deltas = jnp.array([[3.0, 0.0], [0.0, 8.0]])
  # Length (1 * 3 + 4 * 8) / 5 = 7; direction (1, 4) / sqrt(17).
  assert_allclose(
    radial_directional(deltas, jnp.array([1.0, 4.0])),
    7 * np.array([1, 4]) / 17**0.5,
    rtol=1e-6,
  )


def test_rda_is_per_tensor():
  deltas = {'a': normal((3, 4, 5)), 'b': normal((3, 6), seed=1)}
  weights = jnp.array([1.0, 2.0, 0.5])
  merged = radial_directional(deltas, weights)
  for key, delta in deltas.items():
    flat = np.float64(delta).reshape(3, -1)
    lengths = np.linalg.norm(flat, axis=1)
    direction = np.average(flat / lengths[:, None], axis=0, weights=weights)
    expected = np.average(lengths, weights=weights) * direction
    expected /= np.linalg.norm(direction)
    assert_allclose(np.ravel(merged[key]), expected, rtol=1e-5, atol=1e-6)


@both_rules
def test_one_learner_alone_is_the_identity(merge):
  deltas = normal((1, 7, 3))
  assert_array_equal(merge(deltas, jnp.array([0.3])), deltas[0])
  others = jnp.concatenate([jnp.full_like(deltas, jnp.nan), deltas])
  assert_array_equal(merge(others, jnp.array([0.0, 5.0])), deltas[0])


@both_rules
def test_identical_deltas_are_unchanged(merge):
  delta = normal((5,))
  merged = merge(jnp.stack([delta] * 3), jnp.array([1.0, 2.0, 4.0]))
  assert_allclose(merged, delta, rtol=1e-6)


@both_rules
def test_zeros_merge_to_zero(merge):
  assert_array_equal(merge(jnp.zeros((2, 3)), jnp.ones(2)), np.zeros(3))


@both_rules
def test_nobody_there_gives_zero(merge):
  assert_array_equal(
    merge(jnp.full((2, 3), jnp.nan), jnp.zeros(2)), np.zeros(3)
  )


def test_a_zero_delta_counts_in_the_length_only():
  # Lengths 2 and 0, weights 1: mean 1, along the only direction.
  merged = radial_directional(jnp.array([[2.0, 0.0], [0.0, 0.0]]), jnp.ones(2))
  assert_allclose(merged, [1.0, 0.0], rtol=1e-6)


@pytest.mark.parametrize('noise', [0.0, 1e-7])
def test_cancelling_directions_fall_back_to_the_mean(noise):
  # Directions cancel, up to rounding; the mean is (2 - 4) / 2.
  deltas = jnp.array([[2.0, 2.0 * noise], [-4.0, 0.0]])
  merged = radial_directional(deltas, jnp.ones(2))
  assert_allclose(merged, [-1.0, noise], rtol=1e-6)


@both_rules
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_values_of_absent_learners_do_not_matter(merge, bad):
  deltas = {'a': normal((3, 4, 5)), 'b': normal((3,), seed=1)}
  absent = jax.tree.map(lambda d: d.at[1].set(bad), deltas)
  others = jax.tree.map(lambda d: d[jnp.array([0, 2])], deltas)
  merged = jax.jit(merge)(absent, jnp.array([1.0, 0.0, 3.0]))
  expected = merge(others, jnp.array([1.0, 3.0]))
  jax.tree.map(
    lambda one, two: assert_allclose(one, two, rtol=1e-6), merged, expected
  )


@both_rules
def test_values_of_present_learners_are_never_silently_cleaned(merge):
  deltas = normal((4, 5000)).at[2, 777].set(jnp.nan)
  assert np.isnan(jax.jit(merge)(deltas, jnp.ones(4))).any()


@both_rules
@pytest.mark.parametrize('scale', [1e-30, 1e-25, 1e25, 1e36])
def test_squares_neither_overflow_nor_vanish(merge, scale):
  deltas = normal((3, 50))
  weights = jnp.array([1.0, 2.0, 3.0])
  merged = merge(deltas * scale, weights)
  assert_allclose(merged / scale, merge(deltas, weights), rtol=1e-4, atol=1e-6)


@both_rules
def test_accumulation_is_float32(merge):
  # 256 + 1 is 256 in bfloat16: a sum in bfloat16 would give 256 / 257.
  deltas = jnp.ones((257, 1), jnp.bfloat16)
  merged = merge(deltas, jnp.ones(257))
  assert merged.dtype == jnp.float32
  assert_allclose(merged, [1.0], rtol=1e-6)


def test_each_piece_has_its_own_rule():
  deltas = jnp.array([[2.0, 0.0], [0.0, 2.0]])
  rda, mean = jax.jit(merge_pieces, static_argnames='rules')(
    (deltas, deltas), jnp.ones(2), rules=('rda', 'mean')
  )
  assert_allclose(rda, [2**0.5] * 2, rtol=1e-6)
  assert_array_equal(mean, [1.0, 1.0])


def test_errors_give_rule_value_and_fix():
  with pytest.raises(ValueError, match=r'weights, 2, got shape \(3, 4\)'):
    weighted_mean(jnp.zeros((3, 4)), jnp.ones(2))
  with pytest.raises(ValueError, match='weights must be a vector'):
    weighted_mean(jnp.zeros((3, 4)), jnp.array(1.0))
  with pytest.raises(ValueError, match="merge='median' must be one of rda"):
    merge_pieces((jnp.zeros((2, 1)),), jnp.ones(2), ('median',))
  with pytest.raises(ValueError, match='0 rules for 1 pieces'):
    merge_pieces((jnp.zeros((2, 1)),), jnp.ones(2), ())
