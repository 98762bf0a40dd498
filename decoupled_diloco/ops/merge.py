"""Merging: one delta out of the deltas of several learners.

**The sign, stated once:** delta = global - local. A delta is what the learner
has travelled, negated: it descends like a gradient, so the outer optimizer is
an ordinary optax one, and `global - 1.0 * delta` is the learner's value.

All merges take leaves with a leading learner axis and a vector of weights.
Weight zero means absent: such a learner's values do not matter, not even NaN.
Arithmetic is float32 whatever the dtype of the deltas.

Reference: radial-directional averaging, Decoupled DiLoCo (Douillard et al.,
arXiv 2604.21428).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from decoupled_diloco.ops.array_types import (
  Leaf,
  Params,
  PieceValues,
  StackedLeaf,
  StackedParams,
  Weights,
)

# Directions are unit vectors in float32. If their mean is not longer than a few
# roundings they cancel, and its direction would be noise.
_CANCELLED = 8 * float(jnp.finfo(jnp.float32).eps)
# 2^126 and its inverse are both normal numbers, which no platform flushes.
_MAX_EXPONENT = 126


def pseudo_gradient(global_params: Params, local_params: Params) -> Params:
  """The delta, global - local, in float32 also for low-precision parameters.

  >>> import jax.numpy as jnp
  >>> float(pseudo_gradient(jnp.array(3.0), jnp.array(1.0)))
  2.0

  Args:
    global_params: pytree, the published values that the learner started from.
    local_params: pytree of the same structure and shapes.
  """
  return jax.tree.map(
    lambda g, l: _accumulable(g) - _accumulable(l), global_params, local_params
  )


def weighted_mean(deltas: StackedParams, weights: Weights) -> Params:
  """The weighted mean over learners, leaf by leaf; zero if nobody is there.

  >>> import jax.numpy as jnp
  >>> deltas = jnp.array([2.0, 4.0, jnp.nan])
  >>> float(weighted_mean(deltas, jnp.array([1.0, 3.0, 0.0])))  # (2 + 12) / 4
  3.5

  Args:
    deltas: pytree, leaves [learner, ...].
    weights: [learner], not negative.

  Returns:
    Pytree of float32 without the learner axis.

  Raises:
    ValueError: a leaf whose learner axis does not fit the weights.
  """
  return _merge_tree(_mean, deltas, weights)


def radial_directional(deltas: StackedParams, weights: Weights) -> Params:
  """Averages lengths and directions apart, tensor by tensor.

  RDA = (sum w |d| / sum w) * phi(sum w phi(d) / sum w), with phi(x) = x / |x|
  and phi(0) = 0. Deltas of different learners are nearly orthogonal, so their
  mean shrinks as 1 / sqrt(number of learners), and the outer learning rate
  would need retuning with that number; this does not shrink. Where the
  directions cancel, it is the weighted mean.

  >>> import jax.numpy as jnp
  >>> deltas = jnp.array([[2.0, 0.0], [0.0, 2.0]])
  >>> merged = radial_directional(deltas, jnp.ones(2))  # length 2, diagonal
  >>> [round(float(x), 4) for x in merged]
  [1.4142, 1.4142]

  Args:
    deltas: pytree, leaves [learner, ...].
    weights: [learner], not negative.

  Returns:
    Pytree of float32 without the learner axis.

  Raises:
    ValueError: a leaf whose learner axis does not fit the weights.
  """
  return _merge_tree(_radial_directional, deltas, weights)


def merge_pieces(
  values: Sequence[StackedLeaf], weights: Weights, rules: Sequence[str]
) -> PieceValues:
  """Merges every piece by its own rule.

  Args:
    values: one array [learner, ...] per piece.
    weights: [learner], not negative.
    rules: 'rda' or 'mean' per piece.

  Raises:
    ValueError: unknown rule, other number of rules, or a wrong learner axis.
  """
  if len(values) != len(rules):
    raise ValueError(
      f'merge_pieces needs one rule per piece, got {len(rules)} rules for '
      f'{len(values)} pieces.'
    )
  for rule in rules:
    check_rule(rule)
  return tuple(
    _merge_tree(_RULES[rule], value, weights)
    for rule, value in zip(rules, values, strict=True)
  )


def check_rule(rule: str, name: str = 'merge') -> None:
  """Raises ValueError unless `rule` names a merge rule."""
  if rule not in _RULES:
    raise ValueError(f'{name}={rule!r} must be one of {", ".join(_RULES)}.')


def _merge_tree(
  merge: Callable[[StackedLeaf, Weights], Leaf], deltas: Any, weights: Weights
) -> Any:
  weights = jnp.asarray(weights).astype(jnp.float32)
  if weights.ndim != 1:
    raise ValueError(
      f'weights must be a vector, one per learner, got shape {weights.shape}.'
    )
  present = weights > 0
  total = jnp.sum(jnp.where(present, weights, 0))
  shares = jnp.where(present, weights, 0) / jnp.where(total > 0, total, 1)

  def merge_leaf(delta: StackedLeaf) -> Leaf:
    delta = _accumulable(delta)
    if delta.ndim < 1 or delta.shape[0] != weights.shape[0]:
      raise ValueError(
        'Leaves of deltas must have a leading learner axis of the length of '
        f'weights, {weights.shape[0]}, got shape {delta.shape}; '
        'stack the deltas of the learners with jnp.stack.'
      )
    # Absent learners are masked before any arithmetic: 0 * NaN is NaN.
    return merge(jnp.where(_align(present, delta), delta, 0), shares)

  return jax.tree.map(merge_leaf, deltas)


def _accumulable(x: Any) -> jax.Array:
  x = jnp.asarray(x)
  return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _align(vector: jax.Array, delta: jax.Array) -> jax.Array:
  return vector.reshape((-1,) + (1,) * (delta.ndim - 1))


def _mean(delta: StackedLeaf, shares: Weights) -> Leaf:
  # A sum, not a dot: TPUs multiply matrices in bfloat16 by default.
  shares = _align(shares, delta).astype(delta.dtype)
  return jnp.sum(shares * delta, axis=0)


def _radial_directional(delta: StackedLeaf, shares: Weights) -> Leaf:
  axes = tuple(range(1, delta.ndim))
  weights = _align(shares, delta).astype(delta.dtype)
  # Lengths are taken of deltas scaled to a largest magnitude of about one, so
  # that squares neither overflow nor vanish. Powers of two scale exactly.
  peak = jnp.max(jnp.abs(delta), axis=axes, keepdims=True, initial=0)
  exponent = jnp.clip(jnp.frexp(peak)[1], -_MAX_EXPONENT, _MAX_EXPONENT)
  exponent = jnp.where(peak == 0, -_MAX_EXPONENT, exponent)
  one = jnp.ones((), delta.dtype)
  inverse = jnp.ldexp(one, -exponent)
  squares = jnp.square(delta * inverse)
  length = jnp.sqrt(jnp.sum(squares, axis=axes, keepdims=True))
  # One product per value. (A length above 2^126 has no normal inverse; if such
  # deltas were not refused before, this becomes their mean.)
  coefficients = weights * (inverse / jnp.where(length > 0, length, 1))
  direction = jnp.sum(coefficients * delta, axis=0)
  direction_length = jnp.sqrt(jnp.sum(jnp.square(direction)))

  top = jnp.max(exponent)
  radius = jnp.sum(weights * length * jnp.ldexp(one, exponent - top))
  factor = radius / jnp.where(direction_length > 0, direction_length, 1)
  # Of one learner alone this is the identity; the mean is so to the last bit.
  alone = jnp.sum(shares > 0) == 1
  return jnp.where(
    alone | (direction_length <= _CANCELLED),
    _mean(delta, shares),
    direction * factor * jnp.ldexp(one, top),
  )


_RULES: dict[str, Callable[[StackedLeaf, Weights], Leaf]] = {
  'rda': _radial_directional,
  'mean': _mean,
}
