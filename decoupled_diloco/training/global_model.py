"""The syncer's arrays: global parameters, outer optimizer state, residuals.

Everything lies by fragment, as tuples of pieces in float32. What is computed
with it, and why in that way, `merge_programs` tells.
"""

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
from decoupled_diloco.ops.payloads import Payload
from decoupled_diloco.training.merge_programs import MergePrograms
from decoupled_diloco.training.wire_format import WireFormat, wire_shapes


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
    self._programs = MergePrograms(
      plan, tx=tx, merge=merge, embedding_merge=embedding_merge, wire=wire
    )
    self._outer_states = self._programs.first_outer_states(self._values)
    self._residuals = [wire.down.init(values) for values in self._values]
    self._delta_codec = codec('f32')

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
    self._programs.compile(
      fragment,
      empty,
      self._stack({}, {0: empty}),
      self._values[fragment],
      self._outer_states[fragment],
      self._residuals[fragment],
    )

  def norm_of(self, fragment: int, payload: Payload) -> float | None:
    """Euclidean norm of a contribution's delta; None if it is not finite.

    Raises:
      ValueError: if the payload has not the length of this fragment's.
    """
    norm = float(self._programs.norm(self._contribution(fragment, payload)))
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
    delta, norm = self._programs.merge(fragment, stacked, learner_weights)
    updates, is_finite = self._step(fragment, delta)
    self._apply(fragment, updates)
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
    updates, is_finite, outer_state, residual = self._programs.step(
      fragment,
      delta,
      self._values[fragment],
      self._outer_states[fragment],
      self._residuals[fragment],
    )
    self._outer_states[fragment] = outer_state
    self._residuals[fragment] = residual
    return updates, is_finite

  def _apply(self, fragment: int, updates: Any) -> None:
    values = self._values[fragment]
    self._values[fragment] = self._programs.apply(values, updates)

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
    self._apply(fragment, updates)
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
    return payloads.to_bytes(
      self._programs.encode_value(self._values[fragment])
    )

  def published(self, fragment: int) -> PieceValues:
    """The fragment as its newest publication gives it to learners; copies."""
    values = self._values[fragment]
    if self._wire.form == 'value':
      return self._programs.as_published(values)
    return tuple(jnp.copy(value) for value in values)

  def params(self, like: Params) -> Params:
    """The global parameters as a pytree of copies: merges donate the originals.

    Args:
      like: pytree of arrays or shapes with the structure that is wanted.
    """
    return jax.tree.map(jnp.copy, self.plan.assemble(self._values, like))


def _array_name(fragment: int, leaf: int) -> str:
  return f'fragment_{fragment:04}_array_{leaf:04}'
