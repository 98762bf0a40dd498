"""What a learner does with a fragment: hand it over, adopt a newer version.

Pure functions on the parameters of one learner, jit-able with `p` static. Bases
and publications are float32 (`wire_shapes`) also where the parameters are not.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from decoupled_diloco.ops.adopt import AdoptOptions, adopt
from decoupled_diloco.ops.array_types import Params, PieceValues
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.ops.merge import pseudo_gradient
from decoupled_diloco.training.wire_format import WireFormat


class HandOver(NamedTuple):
  """A fragment's delta, encoded.

  Attributes:
    encoded: what the syncer gets: pytree of `Encoded`.
    decoded: the delta as the syncer sees it; None if nobody needs it.
    residual: the error feedback's next state, if this is merged.
  """

  encoded: Any
  decoded: PieceValues | None
  residual: Any


def encode_fragment(
  plan: FragmentPlan,
  wire: WireFormat,
  params: Params,
  p: int,
  base: PieceValues,
  residual: Any,
  *,
  keeps_decoded: bool,
) -> HandOver:
  """The delta of a fragment as it is now.

  Args:
    plan: the fragments.
    wire: the codecs.
    params: the learner's parameters.
    p: which fragment.
    base: the version that it adopted last.
    residual: the error feedback's state.
    keeps_decoded: whether adoption will need the delta as the syncer sees it
      (the rule 'rebase').
  """
  local = plan.take(params, p)
  wide = tuple(l.astype(b.dtype) for b, l in zip(base, local, strict=True))
  delta = pseudo_gradient(as_held(base, local), wide)
  encoded, residual = wire.up.encode(delta, residual)
  decoded = wire.up.decode(encoded) if keeps_decoded else None
  return HandOver(encoded, decoded, residual)


def adopt_fragment(
  plan: FragmentPlan,
  options: AdoptOptions,
  params: Params,
  p: int,
  published: PieceValues,
  base: PieceValues,
  decoded: PieceValues | None,
) -> Params:
  """The learner's parameters after it has adopted a newer version.

  Args:
    plan: the fragments.
    options: how it adopts.
    params: the learner's parameters.
    p: which fragment.
    published: its newer version.
    base: the version that was adopted last: that of now, not of the hand-over,
      for versions that were adopted in between have moved the local copy as
      they moved the base.
    decoded: of the hand-over that was merged since; None if none was.
  """
  local = plan.take(params, p)
  base = as_held(base, local)
  seen = None
  if decoded is not None:
    seen = tuple(b - d for b, d in zip(base, decoded, strict=True))
  adopted = adopt(
    options.rule, local, published, base, seen, alpha=options.alpha
  )
  # Copied, because a whole leaf would be handed through: what was published
  # would then be lost when the next scan donates it.
  return plan.put(params, p, tuple(jnp.copy(x) for x in adopted))


def as_held(base: PieceValues, local: PieceValues) -> PieceValues:
  """The base as the learner holds it: rounded, if its parameters are coarser.

  Otherwise that rounding would count as progress.
  """

  def rounded(b: jax.Array, l: jax.Array) -> jax.Array:
    info = jnp.finfo(l.dtype)
    # Not a cast back and forth, which XLA may drop.
    return lax.reduce_precision(b, info.nexp, info.nmant)

  return tuple(rounded(b, l) for b, l in zip(base, local, strict=True))
