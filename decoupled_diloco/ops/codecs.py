"""Codecs: what a delta or an update looks like on the wire.

A codec is a pair of pure, jit-able functions over an explicit state, as an
optax transform is. With error feedback the state is what quantisation has left
out so far, which is added to the next value before it is encoded.

References: block-scaled 4-bit outer gradients, Streaming DiLoCo (Douillard et
al., arXiv 2501.18512, section 2.4); error feedback, Seide et al., "1-bit
stochastic gradient descent", Interspeech 2014.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoupled_diloco.ops import block_codecs
from decoupled_diloco.ops.array_types import Codes, Leaf, Params, Scales

# Blocks must be whole bytes whatever the number of bits, and are best whole
# vector registers.
_BLOCK_SIZE_UNIT = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
  """One encoded array: a pytree, so jitted functions take and return it.

  Attributes:
    codes: what goes on the wire, flat and without padding: uint8 with several
      codes per byte for the block-scaled formats, else the numbers themselves
      (float32, bfloat16).
    scales: bfloat16, one per block of values; empty without block scaling.
    shape: shape of the array that was encoded (static).
    dtype: its dtype (static).
  """

  codes: Codes | np.ndarray
  scales: Scales | np.ndarray
  shape: tuple[int, ...] = dataclasses.field(metadata={'static': True})
  dtype: Any = dataclasses.field(metadata={'static': True})


class Codec(NamedTuple):
  """A wire format; see `codec`.

  Attributes:
    init: `x -> cstate`.
    encode: `(x, cstate) -> (encoded, cstate)`.
    decode: `encoded -> x_hat`, with the shapes and dtypes of `x`.
    wire_layout: number of values -> (number of codes, dtype of the codes,
      number of scales), for one array.
    name: as given to `codec`.
    bits_per_value: bits per code, without the scales.
    block_size: values that share one scale.
    error_feedback: whether `cstate` is a residual.
  """

  init: Callable[[Params], Params]
  encode: Callable[[Params, Params], tuple[Any, Params]]
  decode: Callable[[Any], Params]
  wire_layout: Callable[[int], tuple[int, Any, int]]
  name: str
  bits_per_value: int
  block_size: int
  error_feedback: bool


class _Numbers(NamedTuple):
  """How one flat float32 vector is encoded."""

  bits: int
  encode: Callable[[jax.Array], tuple[Codes, Scales]]
  decode: Callable[[Codes, Scales, int], jax.Array]
  wire_layout: Callable[[int], tuple[int, Any, int]]


def codec(
  name: str, *, block_size: int = 256, error_feedback: bool = False
) -> Codec:
  """Makes a codec for arrays of any shape, or pytrees of them.

  | name | bits | levels                                    | error  |
  |------|------|-------------------------------------------|--------|
  | f32  | 32   | float32                                   | 0      |
  | bf16 | 16   | bfloat16                                  | 0.0017 |
  | int8 | 8    | -127 ... 127 times the block's scale      | 0.0066 |
  | int4 | 4    | -7 ... 7 times the block's scale          | 0.12   |
  | e3m0 | 4    | 0, +-2^-6 ... 2^0 times the block's scale | 0.20   |
  | int2 | 2    | -1, 0, 1 times the block's scale          | 0.44   |

  (Error: root mean square, relative, on normally distributed values.)

  Blocks of zeros decode to zeros, blocks with a NaN or an infinity to NaNs.
  Decoding is exact, hence bit-identical on all platforms (`block_codecs`).

  Example:

  >>> import jax.numpy as jnp
  >>> int4 = codec('int4')
  >>> x = jnp.array([7.0, -3.0, 0.4])
  >>> encoded, cstate = int4.encode(x, int4.init(x))
  >>> encoded.codes.nbytes, encoded.scales.nbytes  # 3 x 4 bits; one scale
  (2, 2)
  >>> int4.decode(encoded).tolist()
  [7.0, -3.0, 0.0]

  Args:
    name: 'f32', 'bf16', 'int8', 'int4', 'e3m0' or 'int2'.
    block_size: consecutive values (in row-major order) that share a scale, a
      multiple of 8.
    error_feedback: add what was left out before to what is encoded next. The
      state is then a float32 residual of the shape of `x`; keep it only through
      hand-overs that were merged.

  Raises:
    ValueError: unknown name or bad block size; from `encode`, leaves that are
      not floating-point; from `decode`, codes that do not fit the shape.
  """
  if block_size < 1 or block_size % _BLOCK_SIZE_UNIT:
    raise ValueError(
      f'block_size={block_size} must be a positive multiple of '
      f'{_BLOCK_SIZE_UNIT}; 256 is a good choice.'
    )
  numbers = _numbers(name, block_size)

  def init(x: Params) -> Params:
    if not error_feedback:
      return ()
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), x)

  def encode_leaf(x: Leaf) -> Encoded:
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(
        f'Codec {name} encodes floating-point arrays, got dtype {x.dtype}; '
        'convert with .astype(jnp.float32).'
      )
    codes, scales = numbers.encode(x.astype(jnp.float32).reshape(-1))
    return Encoded(codes, scales, tuple(x.shape), jnp.dtype(x.dtype))

  def decode_leaf(encoded: Encoded) -> Leaf:
    size = math.prod(encoded.shape)
    num_codes, _, num_scales = numbers.wire_layout(size)
    got = encoded.codes.shape, encoded.scales.shape
    if got != ((num_codes,), (num_scales,)):
      raise ValueError(
        f'Codec {name} needs {num_codes} codes and {num_scales} scales for '
        f'shape {encoded.shape}, got shapes {got[0]} and {got[1]}; decode with '
        'the codec that encoded (with vmap if it was vmapped).'
      )
    codes, scales = jnp.asarray(encoded.codes), jnp.asarray(encoded.scales)
    flat = numbers.decode(codes, scales, size)
    return _round_to(flat, encoded.dtype).reshape(encoded.shape)

  def encode(x: Params, cstate: Params) -> tuple[Any, Params]:
    x = jax.tree.map(jnp.asarray, x)
    if not error_feedback:
      return jax.tree.map(encode_leaf, x), cstate

    def encode_with_residual(x: Leaf, residual: Leaf) -> tuple[Encoded, Leaf]:
      target = x.astype(jnp.float32) + residual
      encoded = encode_leaf(target)
      # Of what the receiver reconstructs, hence in the dtype of x.
      encoded = dataclasses.replace(encoded, dtype=jnp.dtype(x.dtype))
      left_out = target - decode_leaf(encoded).astype(jnp.float32)
      # A value that is not finite is refused once; it must not stay here and
      # poison all that follow.
      return encoded, jnp.where(jnp.isfinite(left_out), left_out, 0)

    leaves, structure = jax.tree.flatten(x)
    residuals = structure.flatten_up_to(cstate)
    pairs = [
      encode_with_residual(leaf, residual)
      for leaf, residual in zip(leaves, residuals, strict=True)
    ]
    encoded = structure.unflatten([pair[0] for pair in pairs])
    return encoded, structure.unflatten([pair[1] for pair in pairs])

  def decode(encoded: Any) -> Params:
    return jax.tree.map(decode_leaf, encoded, is_leaf=is_encoded)

  return Codec(
    init=init,
    encode=encode,
    decode=decode,
    wire_layout=numbers.wire_layout,
    name=name,
    bits_per_value=numbers.bits,
    block_size=block_size,
    error_feedback=error_feedback,
  )


def is_encoded(x: Any) -> bool:
  """Whether this node of a pytree is one encoded array."""
  return isinstance(x, Encoded)


def _numbers(name: str, block_size: int) -> _Numbers:
  if name == 'f32':
    return _plain(jnp.float32, 32)
  if name == 'bf16':
    return _plain(jnp.bfloat16, 16)
  if name not in block_codecs.FORMATS:
    known = ', '.join(['f32', 'bf16', *block_codecs.FORMATS])
    raise ValueError(f'Codec {name!r} is unknown; choose one of {known}.')
  fmt = block_codecs.FORMATS[name]
  return _Numbers(
    bits=fmt.bits,
    encode=lambda flat: block_codecs.encode_blocks(fmt, flat, block_size),
    decode=lambda codes, scales, size: block_codecs.decode_blocks(
      fmt, codes, scales, size, block_size
    ),
    wire_layout=lambda size: (
      block_codecs.num_code_bytes(fmt, size),
      jnp.uint8,
      block_codecs.num_scales(size, block_size),
    ),
  )


def _plain(dtype: Any, bits: int) -> _Numbers:
  """The numbers themselves. Bytes are made of them at the wire, not here: a
  last axis of 2 or 4 bytes would be padded to 128 in a TPU's memory."""
  return _Numbers(
    bits=bits,
    encode=lambda flat: (_round_to(flat, dtype), jnp.zeros(0, jnp.bfloat16)),
    decode=lambda codes, scales, size: codes.astype(jnp.float32),
    wire_layout=lambda size: (size, dtype, 0),
  )


def _round_to(x: jax.Array, dtype: Any) -> jax.Array:
  """Casts float32 to another floating-point dtype, in every compilation.

  XLA may drop a conversion to lower precision and back where it fuses (it
  allows excess precision), but it never drops a reduce_precision: without it
  the same function would give other bits inside a larger jitted one.
  """
  info = jnp.finfo(dtype)
  if dtype in (jnp.bfloat16, jnp.float16):
    x = lax.reduce_precision(x, info.nexp, info.nmant)
  return x.astype(dtype)
