"""A stack of pre-normalised transformer blocks, which the models share.

Scanned and unrolled stacks are the same model: their parameters start from
equal values and have the same names below `layers.` and `layers.0.`.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from decoupled_diloco.models import layers, moe

_REMAT_POLICIES = {
  'full': None,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
_DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class BlockOptions:
  """Shape and numerics of the blocks of a model.

  Attributes:
    width: width of the residual stream.
    layers: number of blocks.
    heads: query heads.
    kv_heads: key and value heads; divides `heads`. None: as many as `heads`.
    head_dim: width of a head. None: `width / heads`.
    mlp_width: hidden width of the MLP, or of each expert. None: 8/3 of `width`,
      rounded up to a multiple of 64 (as many parameters as an ungated MLP of
      4 x `width`).
    mlp: 'swiglu' or 'geglu'.
    dtype: compute dtype, 'float32' or 'bfloat16'. Parameters, norms' sums,
      softmax, routers and logits are float32 in either case.
    scan_layers: stack the blocks' parameters under `layers.` with a leading
      layer axis and compile one block instead of all; otherwise they are
      named `layers.0.`, `layers.1.`, ... The names below are the same.
    remat: what the backward pass computes again: 'none', 'full' (everything
      but a block's input) or 'dots' (all but the matrix products of weights;
      those of experts, too, are computed again).
    num_experts: experts in every block (see `moe`); 0: a dense MLP.
    experts_per_token: how many of them a token sees.
    capacity_factor: slots of the experts, as a multiple of the tokens they
      would get if all got equally many. Tokens beyond them are dropped;
      `num_experts / experts_per_token` drops none, whatever the router does.
    group_tokens: the most neighbours in a sequence that share slots. Filling
      the slots costs as much a token as a matrix product with
      `capacity_factor * experts_per_token * group_tokens` columns.
    load_balance_weight: of the penalty on uneven routing, summed over layers.
    router_z_weight: of the penalty on large router logits, summed likewise.
  """

  width: int = 64
  layers: int = 2
  heads: int = 4
  kv_heads: int | None = None
  head_dim: int | None = None
  mlp_width: int | None = None
  mlp: str = 'swiglu'
  dtype: str = 'float32'
  scan_layers: bool = False
  remat: str = 'none'
  num_experts: int = 0
  experts_per_token: int = 2
  capacity_factor: float = 2.0
  group_tokens: int = 512
  load_balance_weight: float = 0.01
  router_z_weight: float = 0.001

  def __post_init__(self):
    for name in ('width', 'layers', 'heads', 'group_tokens'):
      check_positive(name, getattr(self, name))
    for name in ('kv_heads', 'head_dim', 'mlp_width'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(
          f'{name}={value} must be at least 1; use None for the default.'
        )
    if self.heads % self.num_kv_heads:
      divisors = [d for d in range(1, self.heads + 1) if self.heads % d == 0]
      raise ValueError(
        f'heads={self.heads} must be a multiple of kv_heads={self.kv_heads}; '
        f'possible: {", ".join(map(str, divisors))}.'
      )
    if self.head_dim is None and self.width % self.heads:
      raise ValueError(
        f'width={self.width} must be a multiple of heads={self.heads} while '
        f'head_dim is None; nearest: {self.width // self.heads * self.heads}, '
        f'{(self.width // self.heads + 1) * self.heads}; or set head_dim.'
      )
    for name, values in (
      ('mlp', layers.MLP_ACTIVATIONS),
      ('dtype', _DTYPES),
      ('remat', ('none', *_REMAT_POLICIES)),
    ):
      check_choice(name, getattr(self, name), values)
    if self.num_experts < 0:
      raise ValueError(
        f'num_experts={self.num_experts} must not be negative; use 0 for a '
        'dense MLP.'
      )
    if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
      raise ValueError(
        f'experts_per_token={self.experts_per_token} must be at least 1 and at '
        f'most num_experts={self.num_experts}; 2 is usual.'
      )
    if not self.capacity_factor > 0.0:
      raise ValueError(
        f'capacity_factor={self.capacity_factor} must be above 0; 2 is a start.'
      )
    for name in ('load_balance_weight', 'router_z_weight'):
      if not getattr(self, name) >= 0.0:
        raise ValueError(
          f'{name}={getattr(self, name)} must not be negative; use 0 for none.'
        )

  @property
  def num_kv_heads(self) -> int:
    return self.heads if self.kv_heads is None else self.kv_heads

  @property
  def size_of_head(self) -> int:
    return self.width // self.heads if self.head_dim is None else self.head_dim

  @property
  def size_of_mlp(self) -> int:
    if self.mlp_width is not None:
      return self.mlp_width
    return -(-8 * self.width // (3 * 64)) * 64

  @property
  def compute_dtype(self) -> jnp.dtype:
    return jnp.dtype(_DTYPES[self.dtype])

  @property
  def residual_scale(self) -> float:
    """Keeps the residual stream's variance independent of depth at the start.

    Source: Radford et al., GPT-2, section 2.3; there are two additions a layer.
    """
    return (2 * self.layers) ** -0.5


def check_positive(name: str, value: int) -> None:
  """Raises ValueError unless the option is at least 1."""
  if value < 1:
    raise ValueError(
      f'{name}={value} must be at least 1; set it to a positive integer.'
    )


def check_choice(name: str, value: Any, values: Iterable[Any]) -> None:
  """Raises ValueError unless the option is one of `values`."""
  if value not in values:
    raise ValueError(
      f'{name}={value!r} is unknown; '
      f'choose one of {", ".join(map(repr, values))}.'
    )


def make_mlp(options: BlockOptions, rngs: nnx.Rngs) -> layers.Mlp:
  """The MLP of one block: the one place that knows which kinds there are."""
  shared = {
    'activation': options.mlp,
    'out_scale': options.residual_scale,
    'dtype': options.compute_dtype,
    'rngs': rngs,
  }
  if not options.num_experts:
    return layers.GatedMlp(options.width, options.size_of_mlp, **shared)
  return moe.MixtureOfExperts(
    options.width,
    options.size_of_mlp,
    num_experts=options.num_experts,
    experts_per_token=options.experts_per_token,
    capacity_factor=options.capacity_factor,
    group_tokens=options.group_tokens,
    load_balance_weight=options.load_balance_weight,
    router_z_weight=options.router_z_weight,
    **shared,
  )


class Block(nnx.Module):
  """One layer: attention, then MLP, each normalised and added."""

  def __init__(self, options: BlockOptions, *, rngs: nnx.Rngs):
    self.attention_norm = layers.RmsNorm(options.width, rngs=rngs)
    self.attention = layers.Attention(
      options.width,
      heads=options.heads,
      kv_heads=options.num_kv_heads,
      head_dim=options.size_of_head,
      out_scale=options.residual_scale,
      dtype=options.compute_dtype,
      rngs=rngs,
    )
    self.mlp_norm = layers.RmsNorm(options.width, rngs=rngs)
    self.mlp = make_mlp(options, rngs)

  def __call__(
    self,
    x: Float[Array, 'batch sequence width'],
    turn: layers.Rotation | None,
    *,
    causal: bool,
  ) -> tuple[Float[Array, 'batch sequence width'], layers.Extra]:
    x = x + self.attention(self.attention_norm(x), turn, causal=causal)
    update, extra = self.mlp(self.mlp_norm(x))
    x = layers.constrain(x + update, 'batch', 'sequence', 'embed')
    return x, extra


def make_layers(options: BlockOptions, rngs: nnx.Rngs) -> Block | nnx.List:
  """The blocks of a model, for its attribute `layers`."""

  def block(key: Array) -> Block:
    return Block(options, rngs=nnx.Rngs(params=key))

  # One key a layer, so that scanned and unrolled start from equal values.
  keys = jax.random.split(rngs.params(), options.layers)
  if not options.scan_layers:
    return nnx.List([block(key) for key in keys])
  metadata = {nnx.PARTITION_NAME: 'layers'}
  return nnx.vmap(block, transform_metadata=metadata)(keys)


def run_layers(
  blocks: Block | nnx.List,
  options: BlockOptions,
  x: Float[Array, 'batch sequence width'],
  turn: layers.Rotation | None,
  *,
  causal: bool,
) -> tuple[Float[Array, 'batch sequence width'], layers.Extra]:
  """Runs what `make_layers` made, one block after the other.

  Returns:
    The residual stream; and the sum of the blocks' penalties, with the means of
    their metrics.
  """

  def rematerialised(graphdef):
    """A block as a pure function of (x, state), with the remat policy."""

    def step(x, state):
      return nnx.merge(graphdef, state)(x, turn, causal=causal)

    if options.remat == 'none':
      return step
    return jax.checkpoint(
      step,
      policy=_REMAT_POLICIES[options.remat],
      # A scan's body cannot be merged with its own recomputation.
      prevent_cse=not options.scan_layers,
    )

  if options.scan_layers:
    graphdef, state = nnx.split(blocks)
    x, extra = jax.lax.scan(rematerialised(graphdef), x, state)
  else:
    extras = []
    for block in cast(nnx.List, blocks):
      graphdef, state = nnx.split(block)
      x, one = rematerialised(graphdef)(x, state)
      extras.append(one)
    extra = jax.tree.map(lambda *leaves: jnp.stack(leaves), *extras)
  return x, layers.Extra(
    jnp.sum(extra.penalty), jax.tree.map(jnp.mean, extra.metrics)
  )
