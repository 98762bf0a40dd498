"""A decoder-only transformer language model in Flax nnx.

Pre-normalised blocks with rotary positions, grouped-query attention and a
gated MLP, as in LLaMA (Touvron et al., arXiv 2302.13971); or, in the place of
the MLP, a mixture of experts.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from decoupled_diloco.models import blocks, layers


@dataclasses.dataclass(frozen=True)
class TransformerOptions(blocks.BlockOptions):
  """Shape and numerics of a `Transformer`: those of its blocks, and these.

  `head_dim` is even, for the rotary positions.

  Attributes:
    vocab_size: number of token ids.
    sequence_length: tokens the model sees at once, in training and sampling.
    tied_embeddings: whether the logits use the input embeddings.
    rope_base: base of the rotary frequencies.
  """

  vocab_size: int = 256
  sequence_length: int = 128
  tied_embeddings: bool = True
  rope_base: float = 10_000.0

  def __post_init__(self):
    super().__post_init__()
    for name in ('vocab_size', 'sequence_length'):
      blocks.check_positive(name, getattr(self, name))
    if self.size_of_head % 2:
      raise ValueError(
        f'The width of a head must be even for rotary positions, but is '
        f'{self.size_of_head}; set head_dim={self.size_of_head + 1}.'
      )
    if self.rope_base <= 1.0:
      raise ValueError(
        f'rope_base={self.rope_base} must be above 1; 10000 is usual.'
      )


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

    self.embed = table()
    self.layers = blocks.make_layers(options, rngs)
    self.final_norm = layers.RmsNorm(options.width, rngs=rngs)
    if not options.tied_embeddings:
      self.unembed = table()

  def __call__(
    self, tokens: Int[Array, 'batch sequence']
  ) -> Float[Array, 'batch sequence vocab']:
    """Float32 logits of the token that follows each position."""
    return self.logits_and_extra(tokens)[0]

  def logits_and_extra(
    self, tokens: Int[Array, 'batch sequence']
  ) -> tuple[Float[Array, 'batch sequence vocab'], layers.Extra]:
    """The logits, and the penalty and metrics of the blocks."""
    options = self.options
    turn = layers.rotation(
      tokens.shape[1], options.size_of_head, options.rope_base
    )
    x = jnp.take(self._table(self.embed), tokens, axis=0)
    x = layers.constrain(x, 'batch', 'sequence', 'embed')
    x, extra = blocks.run_layers(self.layers, options, x, turn, causal=True)
    table = self.embed if options.tied_embeddings else self.unembed
    logits = jnp.einsum(
      'tw,vw->tv',
      self.final_norm(x).reshape(-1, options.width),
      self._table(table),
      preferred_element_type=jnp.float32,
    ).reshape(*tokens.shape, options.vocab_size)
    return layers.constrain(logits, 'batch', 'sequence', 'vocab'), extra

  def _table(self, embed: nnx.Embed) -> Float[Array, 'vocab width']:
    """An embedding in the compute dtype, its rows whole on every device.

    From rows that are sharded in their width, XLA can only look tokens up by
    replicating the result for the whole batch.
    """
    table = embed.embedding[...].astype(self.options.compute_dtype)
    return layers.constrain(table, 'vocab', None)
