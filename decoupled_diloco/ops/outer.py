"""The outer optimizer: an optax transform over merged deltas, by fragment.

`fragment_outer` is the outer step of one fragment, which the syncer applies to
the pieces it has received; `outer_transform` wraps all fragments into one
optax transform over parameter trees.

References: DiLoCo (Douillard et al., arXiv 2311.08105); Decoupled DiLoCo
(Douillard et al., arXiv 2604.21428).
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decoupled_diloco.ops.array_types import (
  Leaf,
  Params,
  PieceValues,
  StackedLeaf,
  StackedParams,
  Weights,
)
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.ops.merge import check_rule, merge_pieces


def outer_optimizer(
  learning_rate: optax.ScalarOrSchedule = 0.7,
  momentum: float | None = 0.9,
  nesterov: bool = True,
) -> optax.GradientTransformation:
  """SGD with Nesterov momentum, on deltas as on gradients.

  The defaults are DiLoCo's, made for H=500 inner steps between two
  synchronisations. What it does to the sequence of deltas is governed by its
  gain, learning_rate / (1 - momentum), here 7; `from_gain` starts from that.

  >>> import jax.numpy as jnp
  >>> tx = outer_optimizer(learning_rate=0.7, momentum=0.9)
  >>> updates, _ = tx.update(jnp.array(1.0), tx.init(jnp.array(5.0)))
  >>> round(float(updates), 4)  # -0.7 * (1 + 0.9)
  -1.33

  Args:
    learning_rate: positive, or an optax schedule over this fragment's versions.
    momentum: in [0, 1); 0 or None for none.
    nesterov: whether momentum looks ahead.

  Raises:
    ValueError: values outside these ranges.
  """
  if not callable(learning_rate) and learning_rate <= 0:
    raise ValueError(
      f'learning_rate={learning_rate} of the outer optimizer must be positive; '
      'use 1.0 without momentum to adopt the merged parameters as they are.'
    )
  _check_momentum(momentum or 0.0)
  if not momentum:
    return optax.sgd(learning_rate)
  return optax.sgd(
    learning_rate, momentum, nesterov, accumulator_dtype=jnp.float32
  )


def from_gain(
  gain: float, momentum: float, nesterov: bool = True
) -> optax.GradientTransformation:
  """The outer optimizer with learning_rate = gain * (1 - momentum).

  The gain is how far a persistent delta moves the parameters in the end. It
  should fall with H: 7 suits H=500, 2 to 3 suit H=24.

  Args:
    gain: positive.
    momentum: in [0, 1).
    nesterov: whether momentum looks ahead.

  Raises:
    ValueError: values outside these ranges.
  """
  if gain <= 0:
    raise ValueError(f'gain={gain} must be positive; 1 is plain averaging.')
  _check_momentum(momentum)
  return outer_optimizer(gain * (1 - momentum), momentum, nesterov)


def suited_gain(momentum: float) -> float:
  """The largest gain that leaves directions calm that learners settle in.

  In a steep direction a learner reaches the bottom between two
  synchronisations, so that its delta is all that is left to go, and the outer
  step of learning_rate * (1 + momentum) with which Nesterov's momentum answers
  at once must not go further. The gain that makes it 0.9 is what was best in
  the quality lab, whatever the momentum.

  Raises:
    ValueError: a momentum outside [0, 1).
  """
  _check_momentum(momentum)
  return 0.9 / (1 - momentum**2)


def suited_momentum(outer_steps: float) -> float:
  """The momentum for so many outer steps per fragment, in [0, 0.9].

  The longer it looks back the faster flat directions are crossed, and the later
  the run's end is heard of. Its horizon 1 / (1 - momentum) is taken as
  outer_steps^(2/3) / 4 (measured: about 2 for 25 outer steps, 3.3 for 50, 5 for
  100), at most the published 10.
  """
  horizon = max(max(outer_steps, 0.0) ** (2 / 3) / 4, 1.0)
  return min(1 - 1 / horizon, 0.9)


def _check_momentum(momentum: float) -> None:
  if not 0 <= momentum < 1:
    raise ValueError(
      f'momentum={momentum} must be at least 0 and below 1; 0.9 is usual.'
    )


class FragmentOuter(NamedTuple):
  """The outer step of one fragment.

  Attributes:
    init: `values -> state`, of values in piece order.
    merge: `(stacked_values, weights) -> merged`; stacked values have a leading
      learner axis. Merged deltas are float32, as the state is.
    step: `(merged, state, values) -> (updates, state)`. Updates have the dtypes
      of the values.
    update: both, `(stacked_values, state, values, weights) -> (updates, state,
      merged)`. If all weights are zero, updates are zero and the state stays as
      it is.
  """

  init: Callable[[PieceValues], Any]
  merge: Callable[..., PieceValues]
  step: Callable[..., tuple[PieceValues, Any]]
  update: Callable[..., tuple[PieceValues, Any, PieceValues]]


def fragment_outer(
  tx: optax.GradientTransformation,
  merge: str,
  plan: FragmentPlan,
  p: int,
  embedding_merge: str = 'mean',
) -> FragmentOuter:
  """Merge and outer step of fragment `p`; all its functions are jit-able.

  Args:
    tx: the outer optimizer, any optax one.
    merge: 'rda' or 'mean'.
    plan: the fragments.
    p: which one.
    embedding_merge: the same for embeddings; 'mean' as published.

  Raises:
    ValueError: unknown rule or fragment.
  """
  check_rule(merge)
  check_rule(embedding_merge, 'embedding_merge')
  rules = tuple(
    embedding_merge if piece.is_embedding else merge for piece in plan.pieces(p)
  )

  def init(values: PieceValues) -> Any:
    return tx.init(_as_float32(values))

  def merge_learners(
    stacked_values: Sequence[StackedLeaf], weights: Weights
  ) -> PieceValues:
    return merge_pieces(stacked_values, weights, rules)

  def step(
    merged: PieceValues, state: Any, values: PieceValues
  ) -> tuple[PieceValues, Any]:
    steps: Any
    steps, state = tx.update(merged, state, _as_float32(values))
    updates = tuple(
      step.astype(value.dtype)
      for step, value in zip(steps, values, strict=True)
    )
    return updates, state

  def update(
    stacked_values: Sequence[StackedLeaf],
    state: Any,
    values: PieceValues,
    weights: Weights,
  ) -> tuple[PieceValues, Any, PieceValues]:
    merged = merge_learners(stacked_values, weights)
    updates, new_state = step(merged, state, values)
    anybody = jnp.any(jnp.asarray(weights) > 0)
    updates = tuple(jnp.where(anybody, update, 0) for update in updates)
    # Momentum decays with merges, not with rounds in which nobody was there.
    new_state = jax.tree.map(
      lambda new, old: jnp.where(anybody, new, old), new_state, state
    )
    return updates, new_state, merged

  return FragmentOuter(init, merge_learners, step, update)


def _as_float32(values: Sequence[Leaf]) -> PieceValues:
  # In bfloat16 a weight of 1 would swallow every update below 0.004.
  return tuple(jnp.asarray(value).astype(jnp.float32) for value in values)


class OuterState(NamedTuple):
  """State of `outer_transform`: that of `tx`, once per fragment."""

  fragments: tuple[Any, ...]


def outer_transform(
  tx: optax.GradientTransformation,
  merge: str,
  plan: FragmentPlan,
  embedding_merge: str = 'mean',
) -> optax.GradientTransformationExtraArgs:
  """The merge and outer step of all fragments, as one optax transform.

  Example:

  >>> import jax.numpy as jnp, optax
  >>> from decoupled_diloco.ops.fragments import fragment
  >>> params = {'a': jnp.ones(2), 'b': jnp.ones(2)}
  >>> plan = fragment(params, num_fragments=2)
  >>> outer = outer_transform(optax.sgd(1.0), merge='mean', plan=plan)
  >>> state = outer.init(params)
  >>> deltas = {'a': jnp.ones((3, 2)), 'b': jnp.ones((3, 2))}  # 3 learners
  >>> updates, state = outer.update(
  ...   deltas, state, params, weights=jnp.ones(3), fragment=0
  ... )
  >>> optax.apply_updates(params, updates)['a'].tolist()
  [0.0, 0.0]
  >>> updates['b'].tolist()
  [0.0, 0.0]

  Args:
    tx: the outer optimizer, any optax one.
    merge: 'rda' or 'mean'.
    plan: made from parameters of this structure.
    embedding_merge: the same for embeddings; 'mean' as published.

  Returns:
    A transform with `update(deltas, state, params, *, weights, fragment=None)`:
    leaves of deltas are [learner, ...], weights [learner]. With `fragment=p`
    (static) only that fragment is merged: other updates are zero and other
    states unchanged; with None, all. Updates have the dtypes of the parameters.

  Raises:
    ValueError: unknown rule; from `update`, missing params or weights, or a
      fragment that does not exist.
  """
  steps = [
    fragment_outer(tx, merge, plan, p, embedding_merge)
    for p in range(plan.num_fragments)
  ]

  def init(params: Params) -> OuterState:
    return OuterState(
      tuple(step.init(plan.take(params, p)) for p, step in enumerate(steps))
    )

  def update(
    updates: StackedParams,
    state: Any,
    params: Params | None = None,
    *,
    weights: Weights | None = None,
    fragment: int | None = None,
    **extra_args: Any,
  ) -> tuple[Params, Any]:
    del extra_args
    if params is None or weights is None:
      missing = 'params' if params is None else 'weights'
      raise ValueError(
        f'The outer transform needs {missing}: call update(deltas, state, '
        'params, weights=weights).'
      )
    if fragment is None:
      chosen = range(plan.num_fragments)
    else:
      chosen = [operator.index(fragment)]
    states = list(state.fragments)
    result = jax.tree.map(jnp.zeros_like, params)
    for p in chosen:
      stacked, values = plan.take_stacked(updates, p), plan.take(params, p)
      step_updates, states[p], _ = steps[p].update(
        stacked, states[p], values, weights
      )
      result = plan.put(result, p, step_updates)
    return result, OuterState(tuple(states))

  return optax.GradientTransformationExtraArgs(init, update)
