"""A merge, as what is compiled for it.

It is three jitted functions. The first decodes all contributions and merges
them. The second takes the outer step and encodes what is published: from the
merged delta alone, so that a journal of merged deltas is enough to come to the
same state again. The third applies what was published, by the same program as a
learner does (`wire_format.apply_update`). In one function with the second, XLA
would contract the outer step's product and the addition to a fused
multiply-add, and the syncer would hold other bits than its learners.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decoupled_diloco.ops.array_types import PieceValues
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.ops.outer import fragment_outer
from decoupled_diloco.training.wire_format import WireFormat, apply_update


class Step(NamedTuple):
  """The outcome of an outer step.

  Attributes:
    updates: what is to be applied; encoded by `wire.down` in the form 'update'.
    is_finite: whether all values will be, once it is applied; a scalar.
    outer_state: the outer optimizer's next state.
    residual: the error feedback's next state.
  """

  updates: Any
  is_finite: jax.Array
  outer_state: Any
  residual: Any


class MergePrograms:
  """The compiled functions of all fragments.

  Args:
    plan: the fragments.
    tx: outer optimizer.
    merge, embedding_merge: as in `OuterOptions`.
    wire: the codecs.
  """

  def __init__(
    self,
    plan: FragmentPlan,
    *,
    tx: optax.GradientTransformation,
    merge: str,
    embedding_merge: str,
    wire: WireFormat,
  ):
    self._wire = wire
    self._outers = [
      fragment_outer(tx, merge, plan, p, embedding_merge)
      for p in range(plan.num_fragments)
    ]
    self._merges = [self._jit_merge(outer.merge) for outer in self._outers]
    self._steps = [self._jit_step(outer.step) for outer in self._outers]
    self._apply = jax.jit(
      functools.partial(apply_update, wire) if wire.form == 'update' else _add,
      donate_argnums=0,
    )
    self._norm = jax.jit(lambda encoded: _norm(wire.up.decode(encoded)))
    self._encode_value = jax.jit(
      lambda values: wire.value.encode(values, wire.value.init(values))[0]
    )
    self._decode_value = jax.jit(wire.value.decode)

  def _jit_merge(self, outer_merge: Callable[..., Any]) -> Any:
    def merge(stacked_codes, weights):
      merged = outer_merge(
        jax.vmap(self._wire.up.decode)(stacked_codes), weights
      )
      return merged, _norm(merged)

    return jax.jit(merge)

  def _jit_step(self, outer_step: Callable[..., Any]) -> Any:
    wire = self._wire

    def step(merged, values, outer_state, residual):
      updates, outer_state = outer_step(merged, outer_state, values)
      is_finite = _is_finite(_add(values, updates))
      if wire.form == 'update':
        updates, residual = wire.down.encode(updates, residual)
      return Step(updates, is_finite, outer_state, residual)

    return jax.jit(step, donate_argnums=(2, 3))

  def first_outer_states(self, values: Sequence[PieceValues]) -> list[Any]:
    """What the outer optimizer begins with, by fragment."""
    return [
      outer.init(before)
      for outer, before in zip(self._outers, values, strict=True)
    ]

  def merge(
    self, fragment: int, stacked: Any, weights: np.ndarray
  ) -> tuple[PieceValues, jax.Array]:
    """Merges contributions.

    Args:
      fragment: which one.
      stacked: encoded by `wire.up`, with a leading learner axis.
      weights: [learner].

    Returns:
      The merged delta, and its Euclidean norm.
    """
    return self._merges[fragment](stacked, weights)

  def step(
    self,
    fragment: int,
    delta: PieceValues,
    values: PieceValues,
    outer_state: Any,
    residual: Any,
  ) -> Step:
    """The outer step; donates the outer state and the residual.

    Args:
      fragment: which one.
      delta: the merged one.
      values: the fragment as it is.
      outer_state: of the outer optimizer.
      residual: of the error feedback.
    """
    return self._steps[fragment](delta, values, outer_state, residual)

  def apply(self, values: PieceValues, updates: Any) -> PieceValues:
    """The next version of a fragment; donates the one before."""
    return self._apply(values, updates)

  def norm(self, encoded: Any) -> jax.Array:
    """Euclidean norm of a contribution."""
    return self._norm(encoded)

  def encode_value(self, values: PieceValues) -> Any:
    """A fragment, encoded as a value."""
    return self._encode_value(values)

  def as_published(self, values: PieceValues) -> PieceValues:
    """A fragment, as those have it that got it as a value."""
    return self._decode_value(self._encode_value(values))

  def compile(
    self,
    fragment: int,
    contribution: Any,
    stacked: tuple[Any, np.ndarray],
    values: PieceValues,
    outer_state: Any,
    residual: Any,
  ) -> None:
    """Compiles all of this for a fragment; changes and donates nothing.

    Args:
      fragment: which one.
      contribution: any one.
      stacked: any arguments of `merge`.
      values, outer_state, residual: as of `step`.
    """
    # Copies, because a merge donates what it changes.
    values, outer_state, residual = jax.tree.map(
      jnp.copy, (values, outer_state, residual)
    )
    self._norm.lower(contribution).compile()
    merged, _ = self.merge(fragment, *stacked)
    made = self.step(fragment, merged, values, outer_state, residual)
    self._encode_value(self.apply(values, made.updates))


def _add(values: PieceValues, updates: PieceValues) -> PieceValues:
  return tuple(
    value + update for value, update in zip(values, updates, strict=True)
  )


def _is_finite(values: PieceValues) -> jax.Array:
  checks = [jnp.all(jnp.isfinite(value)) for value in values]
  return jnp.all(jnp.stack(checks))


def _norm(values: PieceValues) -> jax.Array:
  squares = [
    jnp.sum(jnp.square(value.astype(jnp.float32)))
    for value in jax.tree.leaves(values)
  ]
  return jnp.sqrt(sum(squares[1:], squares[0]))
