"""The layers of a transformer: attention, rotary positions, gated MLP.

Every parameter carries logical axis names (`embed`, `heads`, ...), which
`training.mesh` translates into a sharding. Parameters are float32, whatever
the compute dtype.

Matrix products see [token, feature], not [batch, sequence, feature]: XLA's
CPU backend transposes element by element for a gradient that is summed over
two axes, which makes a step twice as slow. To a TPU it is the same.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jaxtyping import Array, Float

Rotation = tuple[Float[Array, 'sequence half'], Float[Array, 'sequence half']]

MLP_ACTIVATIONS = {'swiglu': jax.nn.silu, 'geglu': jax.nn.gelu}


def axis_metadata(*axes: str | None) -> dict[str, Any]:
  """Metadata of a variable whose dimensions have these logical names.

  Eager sharding is off because logical names mean nothing to a mesh before
  the rules have translated them, and a model must be buildable without one.
  """
  return {'out_sharding': axes, 'eager_sharding': False}


def constrain(x: Float[Array, '...'], *axes: str | None) -> Array:
  """Lays an activation out by its logical axes; nothing outside a mesh.

  Without this the partitioner may carry the sharding of the weights over to
  the activations, and then sums activations where it should gather weights.
  """
  return with_logical_constraint(x, axes)  # pyright: ignore


class RmsNorm(nnx.RMSNorm):
  """Root mean square normalisation (Zhang & Sennrich, arXiv 1910.07467).

  Computes in float32 and returns the dtype it was given.
  """

  def __init__(self, width: int, *, rngs: nnx.Rngs):
    super().__init__(
      width,
      dtype=jnp.float32,
      rngs=rngs,
      scale_metadata=axis_metadata('norm'),
    )

  def __call__(self, x: Float[Array, '*batch width'], mask=None) -> Array:
    return super().__call__(x, mask).astype(x.dtype)


def rotation(length: int, head_dim: int, base: float) -> Rotation:
  """Cosines and sines of rotary positions 0 ... length - 1, in float32.

  Source: Su et al., RoFormer, arXiv 2104.09864, section 3.2. `head_dim` is
  even; pair i turns by `base ** (-2 i / head_dim)` a position.
  """
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequency = jnp.asarray(base, jnp.float32) ** -exponent
  position = jnp.arange(length, dtype=jnp.float32)
  angle = position[:, None] * frequency[None, :]
  return jnp.cos(angle), jnp.sin(angle)


def rotate(
  x: Float[Array, 'batch sequence heads head_dim'], turn: Rotation
) -> Float[Array, 'batch sequence heads head_dim']:
  """Turns each pair (x[i], x[i + head_dim / 2]) by its position's angle."""
  cosine, sine = (part[None, :, None, :].astype(x.dtype) for part in turn)
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate(
    [first * cosine - second * sine, second * cosine + first * sine], axis=-1
  )


class Attention(nnx.Module):
  """Grouped-query attention (Ainslie et al., arXiv 2305.13245).

  `kv_heads == heads` is ordinary multi-head attention, `kv_heads == 1`
  multi-query attention.
  """

  def __init__(
    self,
    width: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    out_scale: float,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
  ):
    def projection(count: int, name: str) -> nnx.LinearGeneral:
      return nnx.LinearGeneral(
        width,
        (count, head_dim),
        use_bias=False,
        dtype=dtype,
        rngs=rngs,
        kernel_metadata=axis_metadata('embed', name, 'head_dim'),
      )

    self.head_dim = head_dim
    self.query = projection(heads, 'heads')
    self.key = projection(kv_heads, 'kv_heads')
    self.value = projection(kv_heads, 'kv_heads')
    self.out = nnx.LinearGeneral(
      (heads, head_dim),
      width,
      axis=(-2, -1),
      use_bias=False,
      dtype=dtype,
      kernel_init=scaled_init(out_scale),
      rngs=rngs,
      kernel_metadata=axis_metadata('heads', 'head_dim', 'embed'),
    )

  def __call__(
    self,
    x: Float[Array, 'batch sequence width'],
    turn: Rotation | None = None,
    *,
    causal: bool = True,
  ) -> Float[Array, 'batch sequence width']:
    batch, sequence, width = x.shape
    tokens = x.reshape(-1, width)
    query, key, value = (
      project(tokens).reshape(batch, sequence, -1, self.head_dim)
      for project in (self.query, self.key, self.value)
    )
    if turn is not None:
      query, key = rotate(query, turn), rotate(key, turn)
    # JAX sums bfloat16 scores in float32 by implicit promotion, which users
    # (and our tests) may have forbidden; the output has the query's dtype.
    with jax.numpy_dtype_promotion('standard'):
      mixed = jax.nn.dot_product_attention(query, key, value, is_causal=causal)
    heads = mixed.shape[2:]
    return self.out(mixed.reshape(-1, *heads)).reshape(x.shape)


class Extra(NamedTuple):
  """What an MLP gives besides its update.

  Attributes:
    penalty: float32 scalar that is added to the training loss, for example
      for a bad balance of experts; zero for a dense MLP.
    metrics: float32 scalars to report.
  """

  penalty: Float[Array, '']
  metrics: dict[str, Float[Array, '']]


class Mlp(Protocol):
  """What a block asks of its MLP; a mixture of experts is another one.

  Returns the update of the residual stream, and what there is besides.
  """

  def __call__(
    self, x: Float[Array, 'batch sequence width']
  ) -> tuple[Float[Array, 'batch sequence width'], Extra]: ...


class GatedMlp(nnx.Module):
  """Gated MLP (Shazeer, arXiv 2002.05202): SwiGLU or GeGLU."""

  def __init__(
    self,
    width: int,
    mlp_width: int,
    *,
    activation: str,
    out_scale: float,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
  ):
    def expand() -> nnx.Linear:
      return nnx.Linear(
        width,
        mlp_width,
        use_bias=False,
        dtype=dtype,
        rngs=rngs,
        kernel_metadata=axis_metadata('embed', 'mlp'),
      )

    self.activation = activation
    self.gate = expand()
    self.up = expand()
    self.down = nnx.Linear(
      mlp_width,
      width,
      use_bias=False,
      dtype=dtype,
      kernel_init=scaled_init(out_scale),
      rngs=rngs,
      kernel_metadata=axis_metadata('mlp', 'embed'),
    )

  def __call__(
    self, x: Float[Array, '*batch width']
  ) -> tuple[Float[Array, '*batch width'], Extra]:
    tokens = x.reshape(-1, x.shape[-1])
    gate = MLP_ACTIVATIONS[self.activation](self.gate(tokens))
    update = self.down(gate * self.up(tokens))
    return update.reshape(x.shape), Extra(jnp.zeros((), jnp.float32), {})


def scaled_init(scale: float) -> nnx.Initializer:
  """Truncated normal with standard deviation `scale / sqrt(fan_in)`."""
  return nnx.initializers.variance_scaling(
    scale**2, 'fan_in', 'truncated_normal'
  )
