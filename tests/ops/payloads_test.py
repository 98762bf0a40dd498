"""Tests of encoded pieces as bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.codecs import codec

CODECS = ['f32', 'bf16', 'int8', 'int4', 'e3m0', 'int2']


def pieces():
  rng = np.random.default_rng(0)
  shapes = [(3, 5), (), (700,), (0,)]
  dtypes = [jnp.float32, jnp.bfloat16, jnp.float32, jnp.float16]
  return tuple(
    jnp.asarray(rng.standard_normal(shape), dtype)
    for shape, dtype in zip(shapes, dtypes, strict=True)
  )


@functools.cache
def encoded_pieces(name, block_size=256):
  made = codec(name, block_size=block_size)
  return made, jax.jit(made.encode)(pieces(), ())[0]


def shapes_of(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize('name', CODECS)
def test_round_trip(name):
  made, encoded = encoded_pieces(name)
  shapes = shapes_of(pieces())
  data = payloads.to_bytes(encoded)
  assert len(data) == payloads.encoded_nbytes(made, shapes)
  for as_type in (bytes, bytearray, memoryview):
    back = payloads.from_bytes(made, shapes, as_type(data))
    assert jax.tree.structure(back) == jax.tree.structure(encoded)
    jax.tree.map(np.testing.assert_array_equal, back, encoded)
    assert payloads.to_bytes(back) == data


@pytest.mark.parametrize('name', CODECS)
def test_spec_is_what_encoding_gives(name):
  made, encoded = encoded_pieces(name, block_size=64)
  spec = payloads.payload_spec(made, shapes_of(pieces()))
  assert [layout.codes_nbytes for layout in spec] == [
    piece.codes.nbytes for piece in encoded
  ]
  assert [layout.num_scales for layout in spec] == [
    piece.scales.size for piece in encoded
  ]
  ends = np.cumsum([layout.nbytes for layout in spec])
  assert [layout.offset for layout in spec] == [0, *ends[:-1]]


def test_layout_on_the_wire():
  # Two values in one block: scale 1 = 7 / 7, codes 7 + 8 = 15 and -1 + 8 = 7 in
  # one byte, 0x7f; then the scale, bfloat16 1.0 = 0x3f80, little-endian.
  made = codec('int4')
  encoded, _ = made.encode((jnp.array([7.0, -1.0]),), ())
  assert payloads.to_bytes(encoded) == bytes([0x7F, 0x80, 0x3F])
  encoded, _ = codec('f32').encode((jnp.array([1.0]),), ())
  assert payloads.to_bytes(encoded) == bytes([0, 0, 0x80, 0x3F])


def test_other_lengths_are_refused():
  made = codec('int4')
  shapes = (jax.ShapeDtypeStruct((300,), jnp.float32),)
  # 150 bytes of codes, two scales of two bytes.
  with pytest.raises(
    ValueError, match='expected 154 bytes for codec int4 and this layout'
  ) as error:
    payloads.from_bytes(made, shapes, b'\0' * 153)
  assert 'got 153' in str(error.value)
