"""A decoder-only transformer language model in Flax nnx.

Pre-normalised blocks with rotary positions, grouped-query attention and a
gated MLP, as in LLaMA (Touvron et al., arXiv 2302.13971).
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from decoupled_diloco.models import layers

_REMAT_POLICIES = {
  'full': None,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
_DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class TransformerOptions:
  """Shape and numerics of a `Transformer`.

  Attributes:
    vocab_size: number of token ids.
    width: width of the residual stream.
    layers: number of blocks.
    heads: query heads.
    kv_heads: key and value heads; divides `heads`. None: as many as `heads`.
    head_dim: width of a head, even. None: `width / heads`.
    mlp_width: hidden width of the MLP. None: 8/3 of `width`, rounded up to a
      multiple of 64 (as many parameters as an ungated MLP of 4 x `width`).
    sequence_length: tokens the model sees at once, in training and sampling.
    mlp: 'swiglu' or 'geglu'.
    tied_embeddings: whether the logits use the input embeddings.
    rope_base: base of the rotary frequencies.
    dtype: compute dtype, 'float32' or 'bfloat16'. Parameters, norms' sums,
      softmax and logits are float32 in either case.
    scan_layers: stack the blocks' parameters under `layers.` with a leading
      layer axis and compile one block instead of all; otherwise they are
      named `layers.0.`, `layers.1.`, ... The names below are the same.
    remat: what the backward pass computes again: 'none', 'full' (everything
      but a block's input) or 'dots' (all but the matrix products).
  """

  vocab_size: int = 256
  width: int = 64
  layers: int = 2
  heads: int = 4
  kv_heads: int | None = None
  head_dim: int | None = None
  mlp_width: int | None = None
  sequence_length: int = 128
  mlp: str = 'swiglu'
  tied_embeddings: bool = True
  rope_base: float = 10_000.0
  dtype: str = 'float32'
  scan_layers: bool = False
  remat: str = 'none'

  def __post_init__(self):
    for name in ('vocab_size', 'width', 'layers', 'heads', 'sequence_length'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name}={getattr(self, name)} must be at least 1; set it to a '
          'positive integer.'
        )
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
    if self.size_of_head % 2:
      raise ValueError(
        f'The width of a head must be even for rotary positions, but is '
        f'{self.size_of_head}; set head_dim={self.size_of_head + 1}.'
      )
    if self.rope_base <= 1.0:
      raise ValueError(
        f'rope_base={self.rope_base} must be above 1; 10000 is usual.'
      )
    for name, values in (
      ('mlp', layers.MLP_ACTIVATIONS),
      ('dtype', _DTYPES),
      ('remat', ('none', *_REMAT_POLICIES)),
    ):
      if getattr(self, name) not in values:
        raise ValueError(
          f'{name}={getattr(self, name)!r} is unknown; '
          f'choose one of {", ".join(map(repr, values))}.'
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


def make_mlp(options: TransformerOptions, rngs: nnx.Rngs) -> layers.Mlp:
  """The MLP of one block: the one place that knows which kinds there are."""
  return layers.GatedMlp(
    options.width,
    options.size_of_mlp,
    activation=options.mlp,
    out_scale=_residual_scale(options),
    dtype=options.compute_dtype,
    rngs=rngs,
  )


def _residual_scale(options: TransformerOptions) -> float:
  """Keeps the residual stream's variance independent of depth at the start.

  Source: Radford et al., GPT-2, section 2.3; there are two additions a layer.
  """
  return (2 * options.layers) ** -0.5


class Block(nnx.Module):
  """One layer: attention, then MLP, each normalised and added."""

  def __init__(self, options: TransformerOptions, *, rngs: nnx.Rngs):
    dtype = options.compute_dtype
    self.attention_norm = layers.RmsNorm(options.width, rngs=rngs)
    self.attention = layers.Attention(
      options.width,
      heads=options.heads,
      kv_heads=options.num_kv_heads,
      head_dim=options.size_of_head,
      out_scale=_residual_scale(options),
      dtype=dtype,
      rngs=rngs,
    )
    self.mlp_norm = layers.RmsNorm(options.width, rngs=rngs)
    self.mlp = make_mlp(options, rngs)

  def __call__(
    self, x: Float[Array, 'batch sequence width'], turn: layers.Rotation
  ) -> tuple[Float[Array, 'batch sequence width'], Float[Array, '']]:
    x = x + self.attention(self.attention_norm(x), turn)
    update, penalty = self.mlp(self.mlp_norm(x))
    x = layers.constrain(x + update, 'batch', 'sequence', 'embed')
    return x, penalty


class Transformer(nnx.Module):
  """The language model: token ids to next-token logits.

  Example:
    >>> options = TransformerOptions(width=32, layers=1)
    >>> model = Transformer(options, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 8), jnp.int32)).shape
    (1, 8, 256)
  """

  def __init__(self, options: TransformerOptions, *, rngs: nnx.Rngs):
    self.options = options

    def table() -> nnx.Embed:
      return nnx.Embed(
        options.vocab_size,
        options.width,
        dtype=options.compute_dtype,
        # Rows of norm 1 give logits of variance 1. Scaled up to variance 1
        # an entry (as in Gemma), a tied model starts by repeating its input
        # and is 5 % behind after 600 steps of a byte model.
        embedding_init=nnx.initializers.normal(options.width**-0.5),
        rngs=rngs,
        embedding_metadata=layers.axis_metadata('vocab', 'embed'),
      )

    def block(key: Array) -> Block:
      return Block(options, rngs=nnx.Rngs(params=key))

    self.embed = table()
    # One key a layer, so that scanned and unrolled start from equal values.
    keys = jax.random.split(rngs.params(), options.layers)
    if options.scan_layers:
      metadata = {nnx.PARTITION_NAME: 'layers'}
      self.layers = nnx.vmap(block, transform_metadata=metadata)(keys)
    else:
      self.layers = nnx.List([block(key) for key in keys])
    self.final_norm = layers.RmsNorm(options.width, rngs=rngs)
    if not options.tied_embeddings:
      self.unembed = table()

  def __call__(
    self, tokens: Int[Array, 'batch sequence']
  ) -> Float[Array, 'batch sequence vocab']:
    """Float32 logits of the token that follows each position."""
    return self.logits_and_penalty(tokens)[0]

  def logits_and_penalty(
    self, tokens: Int[Array, 'batch sequence']
  ) -> tuple[Float[Array, 'batch sequence vocab'], Float[Array, '']]:
    """The logits, and the MLPs' summed penalty to be added to the loss."""
    options = self.options
    turn = layers.rotation(
      tokens.shape[1], options.size_of_head, options.rope_base
    )
    x = jnp.take(self._table(self.embed), tokens, axis=0)
    x = layers.constrain(x, 'batch', 'sequence', 'embed')
    x, penalty = self._run_layers(x, turn)
    table = self.embed if options.tied_embeddings else self.unembed
    logits = jnp.einsum(
      'tw,vw->tv',
      self.final_norm(x).reshape(-1, options.width),
      self._table(table),
      preferred_element_type=jnp.float32,
    ).reshape(*tokens.shape, options.vocab_size)
    return layers.constrain(logits, 'batch', 'sequence', 'vocab'), penalty

  def _table(self, embed: nnx.Embed) -> Float[Array, 'vocab width']:
    """An embedding in the compute dtype, its rows whole on every device.

    From rows that are sharded in their width, XLA can only look tokens up by
    replicating the result for the whole batch.
    """
    table = embed.embedding[...].astype(self.options.compute_dtype)
    return layers.constrain(table, 'vocab', None)

  def _run_layers(
    self, x: Float[Array, 'batch sequence width'], turn: layers.Rotation
  ) -> tuple[Float[Array, 'batch sequence width'], Float[Array, '']]:
    if self.options.scan_layers:
      graphdef, state = nnx.split(self.layers)
      step = self._rematerialised(graphdef, turn)
      x, penalties = jax.lax.scan(step, x, state)
      return x, jnp.sum(penalties)
    penalty = jnp.zeros((), jnp.float32)
    for block in cast(nnx.List, self.layers):
      graphdef, state = nnx.split(block)
      x, more = self._rematerialised(graphdef, turn)(x, state)
      penalty = penalty + more
    return x, penalty

  def _rematerialised(self, graphdef, turn: layers.Rotation):
    """A block as a pure function of (x, state), with the remat policy."""

    def step(x, state):
      return nnx.merge(graphdef, state)(x, turn)

    if self.options.remat == 'none':
      return step
    return jax.checkpoint(
      step,
      policy=_REMAT_POLICIES[self.options.remat],
      # A scan's body cannot be merged with its own recomputation.
      prevent_cse=not self.options.scan_layers,
    )
