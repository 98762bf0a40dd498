"""The syncer's arrays: global parameters, outer optimizer state, residuals.

Everything lies by fragment, as tuples of pieces in float32. A merge is two
jitted functions. The first decodes all contributions, merges them, takes the
outer step and encodes what is published; the second applies what was published,
by the same program as a learner does (`wire_format.apply_update`). In one
function, XLA would contract the outer step's product and the addition to a
fused multiply-add, and the syncer would hold other bits than its learners.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.array_types import Params, PieceValues
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.ops.merge import check_rule
from decoupled_diloco.ops.outer import (
  fragment_outer,
  from_gain,
  suited_gain,
  suited_momentum,
)
from decoupled_diloco.training.wire_format import (
  WireFormat,
  apply_update,
  wire_shapes,
)

Payload = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True)
class OuterOptions:
  """What happens to the contributions of a round.

  Attributes:
    gain: how far a persistent delta moves the parameters in the end,
      learning_rate / (1 - momentum); None: `ops.outer.suited_gain`.
    momentum: of `outer_optimizer`; None: `ops.outer.suited_momentum`.
    nesterov: of `outer_optimizer`.
    merge: 'rda' or 'mean'.
    embedding_merge: the same for embeddings; 'mean' as published.
  """

  gain: float | None = None
  momentum: float | None = None
  nesterov: bool = True
  merge: str = 'rda'
  embedding_merge: str = 'mean'

  def __post_init__(self):
    if self.gain is not None and not math.isfinite(self.gain):
      raise ValueError(f'gain={self.gain} must be finite; 2 to 3 is usual.')
    self.optimizer(outer_steps=100.0)
    check_rule(self.merge)
    check_rule(self.embedding_merge, 'embedding_merge')

  def optimizer(self, outer_steps: float) -> optax.GradientTransformation:
    """The outer optimizer of a run with so many outer steps per fragment."""
    momentum = self.momentum
    if momentum is None:
      momentum = suited_momentum(outer_steps)
    gain = suited_gain(momentum) if self.gain is None else self.gain
    return from_gain(gain, momentum, self.nesterov)


class Merged(NamedTuple):
  """The outcome of a merge.

  Attributes:
    payload: of the publication.
    norm: Euclidean norm of the merged delta.
  """

  payload: bytes
  norm: float


class GlobalModel:
  """The global parameters of a run and their outer optimizer.

  Calls for different fragments may come from different threads, those for one
  fragment must follow each other.

  Args:
    plan: the fragments.
    params: initial parameters; copied.
    tx: outer optimizer.
    merge, embedding_merge: as in `OuterOptions`.
    wire: the codecs.
    num_learners: M, the most contributions that one merge can have.
  """

  def __init__(
    self,
    plan: FragmentPlan,
    params: Params,
    *,
    tx: optax.GradientTransformation,
    merge: str,
    embedding_merge: str = 'mean',
    wire: WireFormat,
    num_learners: int,
  ):
    self.plan = plan
    self._wire = wire
    self._num_learners = num_learners
    fragments = range(plan.num_fragments)
    self._shapes = [wire_shapes(plan, p) for p in fragments]
    self._values = [
      tuple(
        jnp.array(value, shape.dtype)
        for value, shape in zip(
          plan.take(params, p), self._shapes[p], strict=True
        )
      )
      for p in fragments
    ]
    outers = [
      fragment_outer(tx, merge, plan, p, embedding_merge) for p in fragments
    ]
    self._outer_states = [
      outer.init(values)
      for outer, values in zip(outers, self._values, strict=True)
    ]
    self._residuals = [wire.down.init(values) for values in self._values]
    self._merges = [self._jit_merge(outer.update) for outer in outers]
    self._apply = jax.jit(
      functools.partial(apply_update, wire) if wire.form == 'update' else _add,
      donate_argnums=0,
    )
    self._norm = jax.jit(lambda encoded: _norm(wire.up.decode(encoded)))
    self._encode_value = jax.jit(
      lambda values: wire.value.encode(values, wire.value.init(values))[0]
    )
    self._decode_value = jax.jit(wire.value.decode)

  def _jit_merge(self, outer_update):
    wire = self._wire

    def merge(stacked_codes, weights, values, outer_state, residual):
      deltas = jax.vmap(wire.up.decode)(stacked_codes)
      updates, outer_state, merged = outer_update(
        deltas, outer_state, values, weights
      )
      is_finite = _is_finite(_add(values, updates))
      if wire.form == 'update':
        updates, residual = wire.down.encode(updates, residual)
      return updates, _norm(merged), is_finite, outer_state, residual

    return jax.jit(merge, donate_argnums=(3, 4))

  @property
  def form(self) -> str:
    """The form of publications: 'update' or 'value'."""
    return self._wire.form

  def compile(self, fragment: int) -> None:
    """Compiles what a fragment's rounds need, so that none has to wait for it.

    Nothing is changed, and other threads may meanwhile ask for the value.
    """
    empty = self._contribution(
      fragment,
      bytes(payloads.encoded_nbytes(self._wire.up, self._shapes[fragment])),
    )
    self._norm.lower(empty).compile()
    # Copies, because a merge donates what it changes.
    values, outer_state, residual = jax.tree.map(
      jnp.copy,
      (
        self._values[fragment],
        self._outer_states[fragment],
        self._residuals[fragment],
      ),
    )
    stacked, weights = self._stack({}, {0: empty})
    updates, *_ = self._merges[fragment](
      stacked, weights, values, outer_state, residual
    )
    self._encode_value(self._apply(values, updates))

  def norm_of(self, fragment: int, payload: Payload) -> float | None:
    """Euclidean norm of a contribution's delta; None if it is not finite.

    Raises:
      ValueError: if the payload has not the length of this fragment's.
    """
    norm = float(self._norm(self._contribution(fragment, payload)))
    return norm if np.isfinite(norm) else None

  def merge(
    self,
    fragment: int,
    weights: Mapping[int, float],
    contributions: Mapping[int, Payload],
  ) -> Merged:
    """Merges contributions and applies the outer update.

    Args:
      fragment: which one.
      weights: by learner, of those who are merged.
      contributions: payloads by learner.

    Raises:
      FloatingPointError: if the result is not finite; the fragment is then
        unusable, and the run has to go on from its last snapshot.
      ValueError: if a payload has not the length of this fragment's.
    """
    updates, norm = self.merge_encoded(
      fragment,
      weights,
      {
        learner: self._contribution(fragment, contributions[learner])
        for learner in weights
      },
    )
    if self._wire.form == 'value':
      return Merged(self.value_payload(fragment), norm)
    return Merged(payloads.to_bytes(updates), norm)

  def merge_encoded(
    self,
    fragment: int,
    weights: Mapping[int, float],
    encoded: Mapping[int, Any],
  ) -> tuple[Any, float]:
    """`merge` for contributions that are arrays already.

    Args:
      fragment: which one.
      weights: by learner, of those who are merged.
      encoded: by learner, what the codec `wire.up` made of the delta.

    Returns:
      What is published (encoded by `wire.down`, in the form 'update'), and the
      Euclidean norm of the merged delta.

    Raises:
      FloatingPointError: as `merge` does.
    """
    stacked, learner_weights = self._stack(weights, encoded)
    updates, norm, is_finite, outer_state, residual = self._merges[fragment](
      stacked,
      learner_weights,
      self._values[fragment],
      self._outer_states[fragment],
      self._residuals[fragment],
    )
    self._outer_states[fragment] = outer_state
    self._residuals[fragment] = residual
    self._values[fragment] = self._apply(self._values[fragment], updates)
    if not (is_finite and np.isfinite(norm)):
      raise FloatingPointError(
        f'Fragment {fragment} is no longer finite after a merged delta of norm '
        f'{norm}, though every contribution is: values are near the limit of '
        'float32. Lower the inner learning rate, or outer.gain, and resume '
        'from a snapshot.'
      )
    return updates, float(norm)

  def _contribution(self, fragment: int, payload: Payload) -> Any:
    return payloads.from_bytes(self._wire.up, self._shapes[fragment], payload)

  def _stack(
    self, weights: Mapping[int, float], encoded: Mapping[int, Any]
  ) -> tuple[Any, np.ndarray]:
    """Contributions with a learner axis, and their weights.

    Absent learners have weight zero and the arrays of somebody present, so
    that one compiled function serves any set of contributors.
    """
    filler = next(iter(encoded.values()))
    learners = range(self._num_learners)
    stacked = jax.tree.map(
      lambda *leaves: np.stack(leaves),
      *(encoded.get(learner, filler) for learner in learners),
    )
    return stacked, np.array(
      [weights.get(m, 0.0) for m in learners], np.float32
    )

  def value_payload(self, fragment: int) -> bytes:
    """The fragment itself, for a publication of the form 'value'."""
    return payloads.to_bytes(self._encode_value(self._values[fragment]))

  def published(self, fragment: int) -> PieceValues:
    """The fragment as its newest publication gives it to learners; copies."""
    values = self._values[fragment]
    if self._wire.form == 'value':
      return self._decode_value(self._encode_value(values))
    return tuple(jnp.copy(value) for value in values)

  def params(self, like: Params) -> Params:
    """The global parameters as a pytree of copies: merges donate the originals.

    Args:
      like: pytree of arrays or shapes with the structure that is wanted.
    """
    return jax.tree.map(jnp.copy, self.plan.assemble(self._values, like))


def _add(values, updates):
  return tuple(
    value + update for value, update in zip(values, updates, strict=True)
  )


def _is_finite(values) -> jax.Array:
  checks = [jnp.all(jnp.isfinite(value)) for value in values]
  return jnp.all(jnp.stack(checks))


def _norm(values) -> jax.Array:
  squares = [
    jnp.sum(jnp.square(value.astype(jnp.float32)))
    for value in jax.tree.leaves(values)
  ]
  return jnp.sqrt(sum(squares[1:], squares[0]))
