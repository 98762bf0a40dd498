"""The syncer's arrays: global parameters, outer optimizer state, residuals.

Everything lies by fragment, as tuples of pieces in float32. A merge is three
jitted functions. The first decodes all contributions and merges them. The
second takes the outer step and encodes what is published: from the merged
delta alone, so that a journal of merged deltas is enough to come to the same
state again. The third applies what was published, by the same program as a
learner does (`wire_format.apply_update`). In one function with the second, XLA
would contract the outer step's product and the addition to a fused
multiply-add, and the syncer would hold other bits than its learners.
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
from decoupled_diloco.ops.codecs import codec
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
    delta: the merged delta, as what `GlobalModel.replay` needs: its parts, one
      after the other.
  """

  payload: bytes
  norm: float
  delta: tuple[memoryview, ...]


class MergedArrays(NamedTuple):
  """The outcome of a merge, as arrays.

  Attributes:
    updates: what is published (encoded by `wire.down`), in the form 'update'.
    delta: the merged delta.
    norm: its Euclidean norm.
  """

  updates: Any
  delta: PieceValues
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
    self._merges = [self._jit_merge(outer.merge) for outer in outers]
    self._steps = [self._jit_step(outer.step) for outer in outers]
    self._delta_codec = codec('f32')
    self._apply = jax.jit(
      functools.partial(apply_update, wire) if wire.form == 'update' else _add,
      donate_argnums=0,
    )
    self._norm = jax.jit(lambda encoded: _norm(wire.up.decode(encoded)))
    self._encode_value = jax.jit(
      lambda values: wire.value.encode(values, wire.value.init(values))[0]
    )
    self._decode_value = jax.jit(wire.value.decode)

  def _jit_merge(self, outer_merge):
    def merge(stacked_codes, weights):
      merged = outer_merge(
        jax.vmap(self._wire.up.decode)(stacked_codes), weights
      )
      return merged, _norm(merged)

    return jax.jit(merge)

  def _jit_step(self, outer_step):
    wire = self._wire

    def step(merged, values, outer_state, residual):
      updates, outer_state = outer_step(merged, outer_state, values)
      is_finite = _is_finite(_add(values, updates))
      if wire.form == 'update':
        updates, residual = wire.down.encode(updates, residual)
      return updates, is_finite, outer_state, residual

    return jax.jit(step, donate_argnums=(2, 3))

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
    merged, _ = self._merges[fragment](stacked, weights)
    updates, *_ = self._steps[fragment](merged, values, outer_state, residual)
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
    merged = self.merge_encoded(
      fragment,
      weights,
      {
        learner: self._contribution(fragment, contributions[learner])
        for learner in weights
      },
    )
    if self._wire.form == 'value':
      payload = self.value_payload(fragment)
    else:
      payload = payloads.to_bytes(merged.updates)
    delta = self._delta_codec.encode(merged.delta, ())[0]
    return Merged(payload, merged.norm, tuple(payloads.to_views(delta)))

  def merge_encoded(
    self,
    fragment: int,
    weights: Mapping[int, float],
    encoded: Mapping[int, Any],
  ) -> MergedArrays:
    """`merge` for contributions that are arrays already.

    Args:
      fragment: which one.
      weights: by learner, of those who are merged.
      encoded: by learner, what the codec `wire.up` made of the delta.

    Raises:
      FloatingPointError: as `merge` does.
    """
    stacked, learner_weights = self._stack(weights, encoded)
    delta, norm = self._merges[fragment](stacked, learner_weights)
    updates, is_finite = self._step(fragment, delta)
    self._values[fragment] = self._apply(self._values[fragment], updates)
    if not (is_finite and np.isfinite(norm)):
      raise FloatingPointError(
        f'Fragment {fragment} is no longer finite after a merged delta of norm '
        f'{norm}, though every contribution is: values are near the limit of '
        'float32. Lower the inner learning rate, or outer.gain, and resume '
        'from a snapshot.'
      )
    return MergedArrays(updates, delta, float(norm))

  def _step(self, fragment: int, delta: PieceValues) -> tuple[Any, Any]:
    """The outer step; its updates are still to be applied."""
    updates, is_finite, outer_state, residual = self._steps[fragment](
      delta,
      self._values[fragment],
      self._outer_states[fragment],
      self._residuals[fragment],
    )
    self._outer_states[fragment] = outer_state
    self._residuals[fragment] = residual
    return updates, is_finite

  # What a restarted syncer needs.

  def replay(self, fragment: int, delta: Payload, payload: Payload) -> bool:
    """Applies a merge once more.

    What was published is applied as it was, so that the values are those that
    learners hold, to the last bit, even if another processor or version of XLA
    rounds the outer step in another way.

    Args:
      fragment: which one.
      delta: the bytes of `Merged.delta`.
      payload: that of the publication; not needed in the form 'value'.

    Returns:
      Whether the outer step has given the same bits as it did then, as far as
      that can be told.

    Raises:
      ValueError: if one of them has not the length of this fragment's.
    """
    shapes = self._shapes[fragment]
    encoded = payloads.from_bytes(self._delta_codec, shapes, delta)
    updates, _ = self._step(fragment, self._delta_codec.decode(encoded))
    is_same = True
    if self._wire.form == 'update':
      is_same = payloads.to_bytes(updates) == payload
      updates = payloads.from_bytes(self._wire.down, shapes, payload)
    self._values[fragment] = self._apply(self._values[fragment], updates)
    return is_same

  def arrays(self) -> dict[str, jax.Array]:
    """Copies of all arrays: values, outer state, residuals."""
    return jax.tree.map(jnp.copy, self._named_arrays())

  def restore(self, arrays: Mapping[str, Any]) -> None:
    """Takes over what the same model, in another process, had as `arrays`."""
    for p in range(self.plan.num_fragments):
      parts = self._values[p], self._outer_states[p], self._residuals[p]
      leaves, structure = jax.tree.flatten(parts)
      self._values[p], self._outer_states[p], self._residuals[p] = (
        structure.unflatten(
          jnp.array(arrays[_array_name(p, i)], leaf.dtype)
          for i, leaf in enumerate(leaves)
        )
      )

  def _named_arrays(self) -> dict[str, jax.Array]:
    parts = zip(self._values, self._outer_states, self._residuals, strict=True)
    return {
      _array_name(p, i): leaf
      for p, part in enumerate(parts)
      for i, leaf in enumerate(jax.tree.leaves(part))
    }

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


def _array_name(fragment: int, leaf: int) -> str:
  return f'fragment_{fragment:04}_array_{leaf:04}'


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
