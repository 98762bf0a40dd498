"""Block-scaled number formats: few-bit codes, one scale per block of values.

A format maps blocks of float32 values to codes and scales and back. Codes are
packed without padding: n values of b bits take ceil(n * b / 8) bytes.

**The invariant all formats keep:** decode(encode(x)) = q * scale *exactly* in
float32, without rounding. Scales are bfloat16 (8 significant bits), q has at
most 7, so the product has at most 15 of float32's 24; and scales are zero or
large enough that no product is subnormal, which some platforms flush to zero.
A product that needs no rounding is the same on every platform, and so is
`base + q * scale`, whether it is contracted to a fused multiply-add or not. So
whoever adopts `base + decode(update)` has bit-identical parameters.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoupled_diloco.ops.array_types import (
  BlockCodes,
  Blocks,
  BlockScales,
  Codes,
  Flat,
  Scales,
)

_EXPONENT_ONE = 127  # The biased exponent of 1.0.
_MIN_NORMAL_BITS = 0x00800000
_HALF_MANTISSA = np.int32(0x00400000)
_NAN = np.float32(np.nan)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class BlockFormat(NamedTuple):
  """One number format.

  Attributes:
    bits: bits per code.
    quantize: blocks -> codes, one per byte, and scales in float32 whose values
      are exact in bfloat16.
    dequantize: codes and scales -> blocks. NaN comes back as NaN, a block with
      an infinity as NaNs.
  """

  bits: int
  quantize: Callable[[Blocks], tuple[BlockCodes, BlockScales]]
  dequantize: Callable[[BlockCodes, BlockScales], Blocks]


def num_code_bytes(fmt: BlockFormat, num_values: int) -> int:
  """Bytes that the codes of so many values take on the wire."""
  return -(-num_values * fmt.bits // 8)


def num_scales(num_values: int, block_size: int) -> int:
  """Blocks, hence scales, for so many values."""
  return -(-num_values // block_size)


def encode_blocks(
  fmt: BlockFormat, flat: Flat, block_size: int
) -> tuple[Codes, Scales]:
  """Encodes a vector, in blocks of `block_size` (the last may be shorter)."""
  codes, scales = [], []
  for blocks in _in_blocks(flat, block_size):
    block_codes, block_scales = fmt.quantize(blocks)
    codes.append(_pack(block_codes, fmt.bits).reshape(-1))
    scales.append(block_scales.astype(jnp.bfloat16).reshape(-1))
  return _concatenate(codes, jnp.uint8), _concatenate(scales, jnp.bfloat16)


def decode_blocks(
  fmt: BlockFormat,
  codes: Codes,
  scales: Scales,
  num_values: int,
  block_size: int,
) -> Flat:
  """Inverts `encode_blocks`, up to what quantisation lost."""
  full, rest = divmod(num_values, block_size)
  full_bytes = num_code_bytes(fmt, full * block_size)
  values = []
  for count, size, block_codes, block_scales in (
    (full, block_size, codes[:full_bytes], scales[:full]),
    (min(rest, 1), rest, codes[full_bytes:], scales[full:]),
  ):
    if count:
      unpacked = _unpack(block_codes.reshape(count, -1), fmt.bits)[:, :size]
      wide = block_scales.astype(jnp.float32)[:, None]
      values.append(fmt.dequantize(unpacked, wide).reshape(-1))
  return _concatenate(values, jnp.float32)


def _in_blocks(flat: Flat, block_size: int) -> list[Blocks]:
  """The full blocks as one matrix, and the shorter last one as another."""
  split = flat.size - flat.size % block_size
  parts = [
    flat[:split].reshape(-1, block_size),
    flat[split:].reshape(-1, flat.size - split) if split < flat.size else None,
  ]
  return [part for part in parts if part is not None and part.size]


def _concatenate(parts: list[jax.Array], dtype: jnp.dtype) -> jax.Array:
  if not parts:
    return jnp.zeros((0,), dtype)
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _pack(codes: BlockCodes, bits: int) -> BlockCodes:
  """Packs several codes into one byte, within each block.

  Byte j holds code j of the block's first half in its low bits, and code j of
  the second half above (with 2 bits: of the quarters). Unlike neighbours in one
  byte, this needs no strided access: halves are whole vector registers.
  """
  per_byte = 8 // bits
  if per_byte == 1:
    return codes
  count, size = codes.shape
  padding = -size % per_byte
  if padding:  # Only the last block of a vector.
    codes = jnp.pad(codes, ((0, 0), (0, padding)))
  parts = codes.reshape(count, per_byte, -1)
  packed = parts[:, 0]
  for i in range(1, per_byte):
    packed = packed | (parts[:, i] << jnp.uint8(i * bits))
  return packed


def _unpack(packed: BlockCodes, bits: int) -> BlockCodes:
  per_byte = 8 // bits
  if per_byte == 1:
    return packed
  mask = jnp.uint8(2**bits - 1)
  parts = [(packed >> jnp.uint8(i * bits)) & mask for i in range(per_byte)]
  return jnp.stack(parts, axis=1).reshape(packed.shape[0], -1)


def _bits_of(x: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(x, jnp.int32)


def _from_bits(bits: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(bits, jnp.float32)


def _peak(blocks: Blocks) -> BlockScales:
  """Largest magnitude per block. Do not rely on it to propagate NaN.

  XLA's reductions on CPU (as of JAX 0.10) skip NaNs in some shapes, though the
  maximum of two numbers does not. Formats mark NaNs value by value instead.
  """
  return jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)


def _nan_unless_finite(scales: BlockScales, size: BlockScales) -> BlockScales:
  # Blocks with an infinity decode to NaN: what was not finite can be refused by
  # the receiver and is never silently cleaned.
  return jnp.where(jnp.isfinite(size), scales, _NAN)


def _round_up_to_bfloat16(scales: BlockScales, largest: float) -> BlockScales:
  """Rounds to the next bfloat16, at most `largest`; tiny scales become zero.

  Integer arithmetic, since a compiler may drop a conversion to bfloat16 and
  back, and the encoder would then divide by another scale than is sent.
  """
  largest_bits = int(np.float32(largest).view(np.int32)) & ~0xFFFF
  bits = (_bits_of(scales) + jnp.int32(0xFFFF)) & jnp.int32(~0xFFFF)
  bits = jnp.minimum(bits, jnp.int32(largest_bits))
  return _from_bits(jnp.where(bits < _MIN_NORMAL_BITS, jnp.int32(0), bits))


def _integer_quantize(
  blocks: Blocks, scales: BlockScales, bits: int
) -> BlockCodes:
  """Nearest multiple q of the scale, as code q + 2^(bits-1).

  Code 0 is left by symmetric levels, and stands for NaN.
  """
  limit = float(2 ** (bits - 1) - 1)
  # Where the scale is zero every magnitude is tiny, and rounds to zero.
  inverse = jnp.float32(1) / jnp.where(scales > 0, scales, jnp.float32(1))
  q = jnp.clip(jnp.round(blocks * inverse), -limit, limit)
  code = q + jnp.float32(2 ** (bits - 1))
  return jnp.where(jnp.isnan(blocks), jnp.float32(0), code).astype(jnp.uint8)


def _integer_dequantize(
  bits: int,
) -> Callable[[BlockCodes, BlockScales], Blocks]:
  def dequantize(codes: BlockCodes, scales: BlockScales) -> Blocks:
    q = codes.astype(jnp.float32) - jnp.float32(2 ** (bits - 1))
    return jnp.where(codes == 0, _NAN, q * scales)

  return dequantize


def _integer_format(bits: int) -> BlockFormat:
  """Symmetric integers, scaled by the block's largest magnitude."""
  limit = 2 ** (bits - 1) - 1

  def quantize(blocks: Blocks) -> tuple[BlockCodes, BlockScales]:
    peak = _peak(blocks)
    # Rounding up means that the largest magnitude is never clipped; the bound
    # keeps limit * scale finite.
    scales = _round_up_to_bfloat16(
      peak / jnp.float32(limit), _FLOAT32_MAX / limit
    )
    scales = _nan_unless_finite(scales, peak)
    return _integer_quantize(blocks, scales, bits), scales

  return BlockFormat(bits, quantize, _integer_dequantize(bits))


def _ternary_format() -> BlockFormat:
  """-1, 0 and 1 times 1.5 times the block's mean magnitude.

  The best three levels for a normal distribution are 0 and +-1.53 times its
  mean magnitude (J. Max, "Quantizing for minimum distortion", 1960).
  """

  def quantize(blocks: Blocks) -> tuple[BlockCodes, BlockScales]:
    # Divided before they are added, so that the sum cannot overflow.
    share = jnp.abs(blocks) * jnp.float32(1 / blocks.shape[-1])
    mean = jnp.sum(share, axis=-1, keepdims=True)
    # The scale's inverse must be a normal number too, hence at most 2^126.
    scales = _round_up_to_bfloat16(
      jnp.minimum(mean, jnp.float32(2.0**126)) * jnp.float32(1.5),
      2.0**126,
    )
    scales = _nan_unless_finite(scales, mean)
    return _integer_quantize(blocks, scales, 2), scales

  return BlockFormat(2, quantize, _integer_dequantize(2))


def _e3m0_format() -> BlockFormat:
  """Sign and 3-bit exponent: 0 and +-2^-6 ... 2^0 times a power of two.

  The format of the outer gradients in Streaming DiLoCo (arXiv 2501.18512,
  section 2.4). The scale is the power of two nearest to the largest magnitude,
  every value goes to the nearest level. The code of -0 stands for NaN.
  """

  def quantize(blocks: Blocks) -> tuple[BlockCodes, BlockScales]:
    peak = _peak(blocks)
    # Biased exponents of the nearest power of two: adding half of the mantissa
    # carries from 1.5 on. At most 254, the largest of a finite number.
    top = (_bits_of(peak) + _HALF_MANTISSA) >> 23
    top = jnp.clip(top, 0, 254)
    magnitude = _bits_of(blocks) & jnp.int32(0x7FFFFFFF)
    exponent = ((magnitude + _HALF_MANTISSA) >> 23) - top + 7
    # The lowest level, 2^-6, is also nearest to what lies between its half and
    # three quarters of it, which the nearest power of two would make zero.
    from_half = (magnitude >> 23) - top >= -7
    exponent = jnp.clip(exponent, from_half.astype(jnp.int32), 7)
    code = jnp.where((blocks < 0) & (exponent > 0), exponent + 8, exponent)
    code = jnp.where(jnp.isnan(blocks), jnp.int32(8), code)
    # The lowest level must still be a normal number: exponent top - 6 >= 1.
    scales = _from_bits(jnp.where(top < 7, jnp.int32(0), top << 23))
    return code.astype(jnp.uint8), _nan_unless_finite(scales, peak)

  def dequantize(codes: BlockCodes, scales: BlockScales) -> Blocks:
    exponent = (codes & jnp.uint8(7)).astype(jnp.int32)
    bits = jnp.where(exponent > 0, (exponent + (_EXPONENT_ONE - 7)) << 23, 0)
    sign = (codes & jnp.uint8(8)).astype(jnp.int32) << 28
    return jnp.where(codes == 8, _NAN, _from_bits(bits | sign) * scales)

  return BlockFormat(4, quantize, dequantize)


FORMATS: dict[str, BlockFormat] = {
  'int8': _integer_format(8),
  'int4': _integer_format(4),
  'int2': _ternary_format(),
  'e3m0': _e3m0_format(),
}
