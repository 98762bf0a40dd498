"""A mixture of experts in the place of a block's MLP.

A router sends each token to a few of many gated MLPs. Every expert has a fixed
number of slots for each group of tokens, so all shapes are static, and tokens
move in and out of the slots by matrix products with zeros and ones: what a TPU
does best, and what the partitioner can split over any mesh.

References: GShard (Lepikhin et al., arXiv 2006.16668), Switch Transformer
(Fedus et al., arXiv 2101.03961), ST-MoE (Zoph et al., arXiv 2202.08906).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from decoupled_diloco.models import layers


class Routing(NamedTuple):
  """Which token is in which slot of which expert.

  Attributes:
    dispatch: float32, 1 where the token is in that slot, else 0. A slot holds
      at most one token, a token at most one slot of an expert.
    combine: float32, the same times the token's weight for that expert.
    load_balance: Switch Transformer, equation 4: 1 if tokens and probability
      are spread evenly, the number of experts over `experts_per_token` if all
      tokens choose the same ones.
    router_z: ST-MoE, equation 5: the mean square of log sum exp(logits).
    dropped: share of the choices that found no slot.
  """

  dispatch: Float[Array, 'group token expert slot']
  combine: Float[Array, 'group token expert slot']
  load_balance: Float[Array, '']
  router_z: Float[Array, '']
  dropped: Float[Array, '']


def route(
  logits: Float[Array, 'group token expert'],
  is_real: Float[Array, 'group token'],
  experts_per_token: int,
  slots: int,
) -> Routing:
  """Gives each token slots of the experts with the largest logits.

  Slots are dealt out in the order of the tokens, not of the logits or choices:
  whether a token finds one depends on earlier tokens only, so a language model
  cannot learn about the future from it. A choice without a slot is dropped; the
  residual stream passes its token on.

  Args:
    logits: the router's, float32.
    is_real: 1, or 0 for tokens that only fill up a group: they take no slots
      and count for nothing.
    experts_per_token: how many experts a token chooses. Their weights are their
      probabilities, and sum to 1 if there are several; of one alone that would
      leave the router without a gradient.
    slots: of each expert for each group.
  """
  num_experts = logits.shape[-1]
  probabilities = jax.nn.softmax(logits)
  weights, choices = jax.lax.top_k(probabilities, experts_per_token)
  if experts_per_token > 1:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  one_hot = (
    jax.nn.one_hot(choices, num_experts, dtype=jnp.float32)
    * is_real[..., None, None]
  )
  weight_of = jnp.sum(one_hot * weights[..., None], axis=-2)
  chosen = jnp.sum(one_hot, axis=-2)
  # Earlier tokens of the group that chose the expert. Integers, because a sum
  # of float32 may be one of bfloat16 where it is a matrix product.
  taken = chosen.astype(jnp.int32)
  place = jnp.cumsum(taken, axis=1) - taken
  # A place beyond the last slot is nowhere hot.
  dispatch = jax.nn.one_hot(place, slots, dtype=jnp.float32) * chosen[..., None]

  real = jnp.sum(is_real)
  choice_share = jnp.sum(chosen, axis=(0, 1)) / (real * experts_per_token)
  mean_probability = (
    jnp.sum(probabilities * is_real[..., None], axis=(0, 1)) / real
  )
  z = jax.nn.logsumexp(logits, axis=-1)
  return Routing(
    dispatch=dispatch,
    combine=dispatch * weight_of[..., None],
    load_balance=num_experts * jnp.sum(choice_share * mean_probability),
    router_z=jnp.sum(z**2 * is_real) / real,
    dropped=1.0 - jnp.sum(dispatch) / jnp.sum(chosen),
  )


class MixtureOfExperts(nnx.Module):
  """Gated MLPs, of which each token sees the few that its router chooses.

  The router computes in float32. The experts' parameters are those of
  `layers.GatedMlp`, stacked under `experts.` along a leading axis 'expert'.
  """

  def __init__(
    self,
    width: int,
    mlp_width: int,
    *,
    num_experts: int,
    experts_per_token: int,
    capacity_factor: float,
    group_tokens: int,
    load_balance_weight: float,
    router_z_weight: float,
    activation: str,
    out_scale: float,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
  ):
    """See `blocks.BlockOptions` for what the arguments mean."""

    def expert(key: Array) -> layers.GatedMlp:
      return layers.GatedMlp(
        width,
        mlp_width,
        activation=activation,
        out_scale=out_scale,
        dtype=dtype,
        rngs=nnx.Rngs(params=key),
      )

    self.num_experts = num_experts
    self.experts_per_token = experts_per_token
    self.capacity_factor = capacity_factor
    self.group_tokens = group_tokens
    self.load_balance_weight = load_balance_weight
    self.router_z_weight = router_z_weight
    self.router = nnx.Linear(
      width,
      num_experts,
      use_bias=False,
      dtype=jnp.float32,
      # Otherwise a TPU would round the factors to bfloat16.
      precision=jax.lax.Precision.HIGHEST,
      rngs=rngs,
      kernel_metadata=layers.axis_metadata('embed', None),
    )
    self.experts = nnx.vmap(
      expert, transform_metadata={nnx.PARTITION_NAME: 'expert'}
    )(jax.random.split(rngs.params(), num_experts))

  def __call__(
    self, x: Float[Array, 'batch sequence width']
  ) -> tuple[Float[Array, 'batch sequence width'], layers.Extra]:
    batch, sequence, width = x.shape
    # Equal groups, the last of each sequence filled up.
    groups = -(-sequence // self.group_tokens)
    size = -(-sequence // groups)
    filled = jnp.pad(x, ((0, 0), (0, groups * size - sequence), (0, 0)))
    tokens = filled.reshape(batch * groups, size, width)
    is_real = jnp.broadcast_to(
      jnp.arange(groups * size) < sequence, (batch, groups * size)
    )
    routing = route(
      self.router(tokens.reshape(-1, width)).reshape(*tokens.shape[:2], -1),
      is_real.reshape(tokens.shape[:2]).astype(jnp.float32),
      self.experts_per_token,
      self.slots(size),
    )
    update = self._run_experts(tokens, routing).reshape(filled.shape)
    metrics = {
      'load_balance': routing.load_balance,
      'router_z': routing.router_z,
      'dropped': routing.dropped,
    }
    penalty = (
      self.load_balance_weight * routing.load_balance
      + self.router_z_weight * routing.router_z
    )
    return update[:, :sequence], layers.Extra(penalty, metrics)

  def slots(self, size: int) -> int:
    """Slots of each expert for a group of `size` tokens.

    `capacity_factor` times as many as even routing fills, rounded up; more than
    one a token would stay empty.
    """
    even = size * self.experts_per_token / self.num_experts
    # Rounded first, lest 1.1 * 10 tokens get 12 slots.
    return min(size, math.ceil(round(self.capacity_factor * even, 6)))

  def _run_experts(
    self, tokens: Float[Array, 'group token width'], routing: Routing
  ) -> Float[Array, 'group token width']:
    into, out_of = (
      part.astype(tokens.dtype) for part in (routing.dispatch, routing.combine)
    )
    # Whoever holds an expert gathers its tokens from its own part of the batch;
    # only the results of all experts have to be summed across devices.
    slots = layers.constrain(
      jnp.einsum('gtes,gtw->egsw', into, tokens),
      'expert',
      'batch',
      None,
      'embed',
    )
    graphdef, state = nnx.split(self.experts)
    updates = jax.vmap(lambda state, x: nnx.merge(graphdef, state)(x)[0])(
      state, slots
    )
    updates = layers.constrain(updates, 'expert', 'batch', None, 'embed')
    return jnp.einsum('gtes,egsw->gtw', out_of, updates)
