"""In which form fragments travel, up and down; both ends must agree on it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decoupled_diloco.ops.array_types import PieceValues
from decoupled_diloco.ops.codecs import Codec, codec
from decoupled_diloco.ops.fragments import FragmentPlan


@dataclasses.dataclass(frozen=True)
class WireOptions:
  """Codecs of contributions (up) and publications (down).

  Attributes:
    up: codec of the deltas that learners hand over.
    up_error_feedback: whether a learner adds what quantisation left out to its
      next delta of the fragment. The adoption rule 'rebase' does so by itself.
    down: codec of what the syncer publishes.
    down_form: 'update' sends what is to be added to the version before, which
      every learner holds; 'value' sends the fragment itself.
    down_error_feedback: the same for updates, at the syncer.
    block_size: values that share a scale, in the block-scaled codecs.
  """

  up: str = 'int4'
  up_error_feedback: bool = False
  down: str = 'int4'
  down_form: str = 'update'
  down_error_feedback: bool = True
  block_size: int = 256

  def __post_init__(self):
    if self.down_form not in ('update', 'value'):
      raise ValueError(
        f"down_form={self.down_form!r} must be 'update' or 'value'."
      )
    if self.down_form == 'value':
      if self.down not in ('f32', 'bf16'):
        raise ValueError(
          f"down={self.down!r} is too coarse for down_form='value': parameters "
          "need 'f32' or 'bf16'; updates may be coarser "
          "(down_form='update')."
        )
      if self.down_error_feedback:
        raise ValueError(
          "down_error_feedback=True needs down_form='update'; a value has "
          'nothing to make up for. Set it to False.'
        )
    wire_format(self)  # The codecs check their own options.


class WireFormat(NamedTuple):
  """The codecs of a run.

  Attributes:
    up: of contributions.
    down: of publications.
    value: of publications of the form 'value', which joining learners get
      whatever the others get.
    form: of publications: 'update' or 'value'.
  """

  up: Codec
  down: Codec
  value: Codec
  form: str


def wire_format(options: WireOptions) -> WireFormat:
  """The codecs that the options name.

  Raises:
    ValueError: unknown codec or block size.
  """
  up = codec(
    options.up,
    block_size=options.block_size,
    error_feedback=options.up_error_feedback,
  )
  down = codec(
    options.down,
    block_size=options.block_size,
    error_feedback=options.down_error_feedback,
  )
  # Updates build on the exact version before, so whoever joins needs that.
  value = down if options.down_form == 'value' else codec('f32')
  return WireFormat(up, down, value, options.down_form)


def wire_shapes(plan: FragmentPlan, p: int) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Shapes and dtypes in which fragment `p` is published and accumulated.

  Float32 also for parameters of a lower precision: a weight of 1 in bfloat16
  would swallow every update below 0.004.
  """
  return tuple(
    jax.ShapeDtypeStruct(
      shape.shape,
      jnp.float64 if shape.dtype == jnp.float64 else jnp.float32,
    )
    for shape in plan.shapes(p)
  )


def apply_update(
  wire: WireFormat, values: PieceValues, encoded: Any
) -> PieceValues:
  """The next version of a fragment; jit-able.

  Both ends compile it as it stands, with `encoded` as an argument, so that
  they hold the same bits.

  Args:
    wire: the codecs, of the form 'update'.
    values: the version before.
    encoded: what was published.
  """
  updates = wire.down.decode(encoded)
  return tuple(
    value + update for value, update in zip(values, updates, strict=True)
  )
