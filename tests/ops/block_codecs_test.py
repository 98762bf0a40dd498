"""The invariant of block formats: decoding needs no rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled_diloco.ops import block_codecs

formats = pytest.mark.parametrize('name', block_codecs.FORMATS)


def random_blocks(seed=0):
  """Blocks of normally distributed values over the whole range of float32."""
  rng = np.random.default_rng(seed)
  blocks = rng.standard_normal((250, 64))
  scales = 2.0 ** np.linspace(-148, 125, 250)
  return jnp.asarray(np.float32(blocks * scales[:, None]))


@formats
def test_products_of_codes_and_scales_are_exact(name):
  fmt = block_codecs.FORMATS[name]
  codes, scales = fmt.quantize(random_blocks())
  # Scales are bfloat16 already: the lower 16 bits are zero.
  assert (np.asarray(scales).view(np.uint32) & 0xFFFF == 0).all()
  one = jnp.ones_like(scales)
  q = np.float64(fmt.dequantize(codes, one))
  exact = q * np.float64(scales)
  np.testing.assert_array_equal(
    np.float64(fmt.dequantize(codes, scales)), exact
  )
  tiny = float(np.finfo(np.float32).tiny)
  assert ((exact == 0) | (np.abs(exact) >= tiny)).all()


@formats
def test_a_fused_multiply_add_gives_the_same_bits(name):
  fmt = block_codecs.FORMATS[name]
  codes, scales = fmt.quantize(random_blocks())
  base = np.asarray(random_blocks(seed=1))
  product = np.asarray(fmt.dequantize(codes, scales))
  q = np.float64(fmt.dequantize(codes, jnp.ones_like(scales)))
  # In float64 the sum has, up to far apart exponents, all its bits, so this
  # rounds once, as a fused multiply-add does.
  fused = np.float32(np.float64(base) + q * np.float64(scales))
  np.testing.assert_array_equal(base + product, fused)


@formats
@pytest.mark.parametrize('size', [1, 13, 64, 200])
def test_packing_loses_nothing(name, size):
  fmt = block_codecs.FORMATS[name]
  flat = random_blocks().reshape(-1)[-size:]
  codes, scales = jax.jit(block_codecs.encode_blocks, static_argnums=(0, 2))(
    fmt, flat, 64
  )
  assert codes.size == block_codecs.num_code_bytes(fmt, size)
  decoded = jax.jit(block_codecs.decode_blocks, static_argnums=(0, 3, 4))(
    fmt, codes, scales, size, 64
  )
  expected = []
  for start in range(0, size, 64):
    block = flat[None, start : start + 64]
    codes_and_scales = jax.jit(fmt.quantize)(block)
    expected.append(np.ravel(jax.jit(fmt.dequantize)(*codes_and_scales)))
  np.testing.assert_array_equal(decoded, np.concatenate(expected))


def test_two_codes_share_a_byte_by_halves_of_the_block():
  fmt = block_codecs.FORMATS['int4']
  flat = jnp.array([7.0, 1, 2, 3, -7, -1, -2, -3])
  codes, scales = block_codecs.encode_blocks(fmt, flat, 8)
  assert scales.tolist() == [1.0]  # 7 / 7
  # Codes are q + 8; the second half is in the upper four bits.
  assert codes.tolist() == [15 + 16 * 1, 9 + 16 * 7, 10 + 16 * 6, 11 + 16 * 5]


def test_levels_of_e3m0():
  fmt = block_codecs.FORMATS['e3m0']
  levels = [0.0, *(2.0**k for k in range(-6, 1))]
  block = jnp.array([[*levels, *(-level for level in levels)]])
  codes, scales = fmt.quantize(block)
  assert scales.tolist() == [[1.0]]
  np.testing.assert_array_equal(fmt.dequantize(codes, scales), block)
  # Each value goes to the nearest level; 1.4 and 1.6 of the peak's binade.
  block = jnp.array([[1.4, 0.76, 0.74, 0.009, 0.007, -0.3]])
  codes, scales = fmt.quantize(block)
  np.testing.assert_array_equal(
    fmt.dequantize(codes, scales), [[1, 1, 0.5, 1 / 64, 0, -0.25]]
  )
  assert fmt.quantize(jnp.array([[1.6]]))[1].tolist() == [[2.0]]
