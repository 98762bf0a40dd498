"""A learner's compiled programs, and how what they take lies on its mesh.

Bases, deltas and publications lie like the parameters that they belong to, and
are float32 (`wire_shapes`) also where the parameters are not.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.array_types import Params, PieceValues
from decoupled_diloco.ops.codecs import Codec
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.ops.pieces import Piece, named_leaves
from decoupled_diloco.training.learner_fragments import (
  HandOver,
  adopt_fragment,
  encode_fragment,
)
from decoupled_diloco.training.step import TrainScan, TrainState
from decoupled_diloco.training.wire_format import (
  WireFormat,
  apply_update,
  wire_shapes,
)

Shardings = tuple[NamedSharding, ...]


class Held(NamedTuple):
  """All that a learner keeps from one scan boundary to the next.

  Attributes:
    state: what it trains.
    bases: by fragment, the version that was adopted last.
    residuals: by fragment, the state of the error feedback.
  """

  state: TrainState
  bases: list[PieceValues]
  residuals: list[Any]


class LearnerPrograms:
  """What one learner runs on its mesh, but for the scan.

  Args:
    plan: the fragments.
    trainer: the compiled training functions.
    wire: the codecs.
    options: how newer versions are adopted.

  Attributes:
    shapes: by fragment, shapes and dtypes of its pieces, as they travel.
    shardings: by fragment, where they lie.
    keeps_progress: whether adoption leaves in place what no merge has seen.
  """

  def __init__(
    self,
    plan: FragmentPlan,
    trainer: TrainScan,
    *,
    wire: WireFormat,
    options: AdoptOptions,
  ):
    self._plan = plan
    self._trainer = trainer
    self._wire = wire
    self._options = options
    self.keeps_progress = options.rule == 'rebase'
    fragments = range(plan.num_fragments)
    leaves = named_leaves(trainer.state_shardings.params)
    self.shapes = [wire_shapes(plan, p) for p in fragments]
    self.shardings: list[Shardings] = [
      tuple(_cut(leaves[piece.paths[0]], piece) for piece in plan.pieces(p))
      for p in fragments
    ]
    self._assemble = jax.jit(
      self._assemble_params, out_shardings=trainer.state_shardings.params
    )
    self._adopt = jax.jit(
      self._adopt_fragment,
      static_argnums=1,
      donate_argnums=0,
      # Exactly what the compiled scan takes.
      out_shardings=trainer.state_shardings.params,
    )
    self._encode = jax.jit(self._encode_fragment, static_argnums=1)
    # Shardings are static, so that fragments of the same shapes share what is
    # compiled.
    self._decode_update = jax.jit(self._next_version, static_argnums=0)
    self._decode_value = jax.jit(wire.value.decode)
    self._copy = jax.jit(
      lambda state: jax.tree.map(jnp.copy, state),
      out_shardings=trainer.state_shardings,
    )

  def assemble(self, values: Sequence[PieceValues]) -> Params:
    """Parameters of these values of all fragments."""
    return self._assemble(values)

  def adopt(
    self,
    params: Params,
    p: int,
    published: PieceValues,
    base: PieceValues,
    decoded: PieceValues | None,
  ) -> Params:
    """As `adopt_fragment`; donates the parameters."""
    return self._adopt(params, p, published, base, decoded)

  def encode(
    self, params: Params, p: int, base: PieceValues, residual: Any
  ) -> HandOver:
    """As `encode_fragment`."""
    return self._encode(params, p, base, residual)

  def local_copy(self, params: Params, p: int) -> PieceValues:
    """A fragment as the learner has it, in the form of a version of it.

    Copies, because the parameters are donated.
    """
    local = self._plan.take(params, p)
    values = tuple(
      jnp.array(value, shape.dtype)
      for value, shape in zip(local, self.shapes[p], strict=True)
    )
    return jax.device_put(values, self.shardings[p])

  def decode_update(
    self, p: int, before: PieceValues, encoded: Any
  ) -> PieceValues:
    """The next version of a fragment, made of the one before."""
    return self._decode_update(self.shardings[p], before, encoded)

  def decode_value(self, p: int, encoded: Any) -> PieceValues:
    """A version of a fragment that was published as a value."""
    return jax.device_put(self._decode_value(encoded), self.shardings[p])

  def copy(self, state: TrainState) -> TrainState:
    """Copies that lie where the state does, and that no scan donates."""
    return self._copy(state)

  def first_residuals(self, bases: Sequence[PieceValues]) -> list[Any]:
    """What the error feedback of all fragments begins with."""
    if not self._wire.up.error_feedback:
      return [()] * len(bases)
    return [
      jax.device_put(self._wire.up.init(base), shardings)
      for base, shardings in zip(bases, self.shardings, strict=True)
    ]

  def abstract(self) -> Held:
    """Shapes and dtypes of what a learner keeps, and where it lies."""
    bases = [
      _placed(shapes, shardings)
      for shapes, shardings in zip(self.shapes, self.shardings, strict=True)
    ]
    residuals: list[Any] = [()] * len(bases)
    if self._wire.up.error_feedback:
      residuals = [
        _placed(jax.eval_shape(self._wire.up.init, base), shardings)
        for base, shardings in zip(bases, self.shardings, strict=True)
      ]
    return Held(self._trainer.abstract_state, bases, residuals)

  def compile(self, batches: Any) -> None:
    """Compiles all that a learner runs, so that no boundary waits for it.

    Args:
      batches: arrays or shapes of one scan's batches.
    """
    self._trainer.compile(batches)
    state, bases, residuals = self.abstract()
    shapes = self._param_shapes()
    params = _placed(shapes, self._trainer.state_shardings.params)
    self._copy.lower(state).compile()
    for p, (base, residual) in enumerate(zip(bases, residuals, strict=True)):
      self._encode.lower(params, p, base, residual).compile()
      for decoded in [None, base] if self.keeps_progress else [None]:
        self._adopt.lower(params, p, base, base, decoded).compile()
      self._decode_value.lower(self._zeros(self._wire.value, p)).compile()
      if self._wire.form == 'update':
        self._decode_update.lower(
          self.shardings[p], base, self._zeros(self._wire.down, p)
        ).compile()
    self._assemble.lower(bases).compile()

  # The functions that are jitted.

  def _assemble_params(self, values: Sequence[PieceValues]) -> Params:
    return self._plan.assemble(values, self._param_shapes())

  def _adopt_fragment(
    self,
    params: Params,
    p: int,
    published: PieceValues,
    base: PieceValues,
    decoded: PieceValues | None,
  ) -> Params:
    return adopt_fragment(
      self._plan, self._options, params, p, published, base, decoded
    )

  def _encode_fragment(
    self, params: Params, p: int, base: PieceValues, residual: Any
  ) -> HandOver:
    encoded, decoded, residual = encode_fragment(
      self._plan,
      self._wire,
      params,
      p,
      base,
      residual,
      keeps_decoded=self.keeps_progress,
    )
    if decoded is not None:
      decoded = lax.with_sharding_constraint(decoded, self.shardings[p])
    if self._wire.up.error_feedback:
      residual = lax.with_sharding_constraint(residual, self.shardings[p])
    return HandOver(encoded, decoded, residual)

  def _next_version(
    self, shardings: Shardings, before: PieceValues, encoded: Any
  ) -> PieceValues:
    values = apply_update(self._wire, before, encoded)
    return lax.with_sharding_constraint(values, shardings)

  def _param_shapes(self) -> Any:
    return jax.eval_shape(self._trainer.task.init, jax.random.key(0))

  def _zeros(self, codec: Codec, fragment: int) -> Any:
    shapes = self.shapes[fragment]
    nbytes = payloads.encoded_nbytes(codec, shapes)
    return payloads.from_bytes(codec, shapes, bytes(nbytes))


def _placed(shapes: Any, shardings: Any) -> Any:
  """Shapes that lie somewhere, to compile for."""
  return jax.tree.map(
    lambda shape, sharding: jax.ShapeDtypeStruct(
      shape.shape, shape.dtype, sharding=sharding
    ),
    shapes,
    shardings,
  )


def _cut(sharding: NamedSharding, piece: Piece) -> NamedSharding:
  """How a piece of a leaf lies, if the leaf lies so: where it lies already."""
  ndim = len(piece.leaf_shape)
  axes = [*sharding.spec, *(None,) * (ndim - len(sharding.spec))]
  if piece.layer is not None:
    del axes[0]
  spec = PartitionSpec(*axes)
  if piece.rows is not None:
    # A block of rows that the devices cannot share evenly lies on all of them.
    try:
      NamedSharding(sharding.mesh, spec).shard_shape(piece.shape)
    except ValueError:
      spec = PartitionSpec(None, *axes[1:])
  return NamedSharding(sharding.mesh, spec)
