"""A small vision transformer: images to class logits.

Patches, positions, the blocks of `blocks` without a causal mask, and the mean
over the patches instead of a class token.

References: Dosovitskiy et al., arXiv 2010.11929; Beyer et al., "Better plain
ViT baselines for ImageNet-1k", arXiv 2205.01580 (mean pooling, fixed sine and
cosine positions).
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from decoupled_diloco.models import blocks, layers

_POSITIONS = ('learned', 'sincos')


@dataclasses.dataclass(frozen=True)
class VitOptions(blocks.BlockOptions):
  """Shape and numerics of a `Vit`: those of its blocks, and these.

  Attributes:
    image_size: height and width of an image, in pixels.
    channels: values of a pixel.
    patch_size: height and width of a patch, in pixels; divides `image_size`.
    num_classes: number of labels.
    positions: 'learned', or 'sincos' (fixed; needs a `width` that 4 divides).
  """

  image_size: int = 8
  channels: int = 1
  patch_size: int = 2
  num_classes: int = 10
  positions: str = 'learned'

  def __post_init__(self):
    super().__post_init__()
    for name in ('image_size', 'channels', 'patch_size', 'num_classes'):
      blocks.check_positive(name, getattr(self, name))
    blocks.check_choice('positions', self.positions, _POSITIONS)
    if self.image_size % self.patch_size:
      divisors = [
        size
        for size in range(1, self.image_size + 1)
        if self.image_size % size == 0
      ]
      raise ValueError(
        f'image_size={self.image_size} must be a multiple of '
        f'patch_size={self.patch_size}; possible: '
        f'{", ".join(map(str, divisors))}.'
      )
    if self.positions == 'sincos' and self.width % 4:
      raise ValueError(
        f"width={self.width} must be a multiple of 4 with positions='sincos'; "
        f"nearest: {-(-self.width // 4) * 4}; or use 'learned'."
      )

  @property
  def patches_per_side(self) -> int:
    return self.image_size // self.patch_size


class Vit(nnx.Module):
  """The image classifier.

  Example:
    >>> options = VitOptions(width=32, layers=1)
    >>> model = Vit(options, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 8, 8, 1))).shape
    (1, 10)
  """

  def __init__(self, options: VitOptions, *, rngs: nnx.Rngs):
    self.options = options
    self.patches = nnx.Linear(
      options.patch_size**2 * options.channels,
      options.width,
      dtype=options.compute_dtype,
      rngs=rngs,
      kernel_metadata=layers.axis_metadata(None, 'embed'),
      bias_metadata=layers.axis_metadata('embed'),
    )
    if options.positions == 'learned':
      shape = (options.patches_per_side**2, options.width)
      self.positions = nnx.Param(
        nnx.initializers.normal(0.02)(rngs.params(), shape, jnp.float32),
        **layers.axis_metadata('sequence', 'embed'),
      )
    self.layers = blocks.make_layers(options, rngs)
    self.final_norm = layers.RmsNorm(options.width, rngs=rngs)
    self.head = nnx.Linear(
      options.width,
      options.num_classes,
      dtype=jnp.float32,
      # All classes are equally likely at the start.
      kernel_init=nnx.initializers.zeros_init(),
      rngs=rngs,
      kernel_metadata=layers.axis_metadata('embed', None),
    )

  def __call__(
    self, images: Float[Array, 'batch height width channel']
  ) -> Float[Array, 'batch class']:
    """Float32 logits of the classes."""
    return self.logits_and_extra(images)[0]

  def logits_and_extra(
    self, images: Float[Array, 'batch height width channel']
  ) -> tuple[Float[Array, 'batch class'], layers.Extra]:
    """The logits, and the penalty and metrics of the blocks."""
    options = self.options
    tokens = cut_patches(images, options.patch_size)
    x = self.patches(tokens.reshape(-1, tokens.shape[-1]))
    x = x.reshape(*tokens.shape[:2], options.width)
    if options.positions == 'learned':
      positions = self.positions[...]
    else:
      positions = sincos_positions(options.patches_per_side, options.width)
    x = x + positions.astype(x.dtype)[None]
    x = layers.constrain(x, 'batch', 'sequence', 'embed')
    x, extra = blocks.run_layers(self.layers, options, x, None, causal=False)
    x = self.final_norm(x).astype(jnp.float32)
    return self.head(jnp.mean(x, axis=1)), extra


def cut_patches(
  images: Float[Array, 'batch height width channel'], size: int
) -> Float[Array, 'batch patch value']:
  """Square patches, row by row; their values row by row, channels last."""
  batch, height, width, channels = images.shape
  rows, columns = height // size, width // size
  split = images.reshape(batch, rows, size, columns, size, channels)
  return split.transpose(0, 1, 3, 2, 4, 5).reshape(
    batch, rows * columns, size * size * channels
  )


def sincos_positions(side: int, width: int) -> Float[Array, 'patch width']:
  """Fixed positions of `side` x `side` patches, row by row, in float32.

  Of each vector a quarter each are the sines and cosines of the column, then
  those of the row, at frequencies from 1 to 1/10,000 (Beyer et al.).
  """
  quarter = width // 4
  exponent = jnp.arange(quarter, dtype=jnp.float32) / max(quarter - 1, 1)
  frequency = jnp.asarray(10_000.0, jnp.float32) ** -exponent
  angle = jnp.arange(side, dtype=jnp.float32)[:, None] * frequency[None, :]
  waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
  shape = (side, side, width // 2)
  return jnp.concatenate(
    [
      jnp.broadcast_to(waves[None, :, :], shape),
      jnp.broadcast_to(waves[:, None, :], shape),
    ],
    axis=-1,
  ).reshape(side * side, width)
