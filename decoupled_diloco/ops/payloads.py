"""Payloads: encoded pieces as bytes, and back.

The bytes of a fragment are, for every piece in order, its codes and then its
scales, little-endian, with nothing between them. Both ends know the layout from
the codec and the fragment plan, so a payload carries no header; its length is
checked exactly, its integrity by the transport's checksum.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from decoupled_diloco.ops.array_types import ShapeTree
from decoupled_diloco.ops.codecs import Codec, Encoded, is_encoded

# Any contiguous bytes. (What a transport takes it defines for itself: neither
# knows the other.)
Payload: TypeAlias = bytes | bytearray | memoryview

_SCALE_DTYPE = np.dtype(jax.numpy.bfloat16)


class PieceLayout(NamedTuple):
  """Where one piece lies in a payload, in bytes; scales follow the codes."""

  offset: int
  codes_nbytes: int
  num_scales: int

  @property
  def nbytes(self) -> int:
    return self.codes_nbytes + self.num_scales * _SCALE_DTYPE.itemsize


def payload_spec(codec: Codec, shapes: ShapeTree) -> tuple[PieceLayout, ...]:
  """The layout of a payload, piece by piece.

  >>> import jax, jax.numpy as jnp
  >>> from decoupled_diloco.ops.codecs import codec
  >>> shapes = (jax.ShapeDtypeStruct((300,), jnp.float32),) * 2
  >>> payload_spec(codec('int4'), shapes)[1]  # 150 + 2 * 2 bytes come before
  PieceLayout(offset=154, codes_nbytes=150, num_scales=2)

  Args:
    codec: the wire format.
    shapes: pytree of arrays or shapes, e.g. `plan.shapes(p)`.
  """
  return tuple(layout for layout, _ in _layouts(codec, jax.tree.leaves(shapes)))


def encoded_nbytes(codec: Codec, shapes: ShapeTree) -> int:
  """Length in bytes of the payload of these shapes."""
  return sum(layout.nbytes for layout in payload_spec(codec, shapes))


def to_bytes(encoded: Any) -> bytes:
  """The payload of a pytree of `Encoded`, fetched from the device at once."""
  return b''.join(to_views(encoded))


def to_views(encoded: Any) -> list[memoryview]:
  """The parts of `to_bytes`, not put together: copies only what it must."""
  arrays = []
  for piece in jax.tree.leaves(encoded, is_leaf=is_encoded):
    arrays += [piece.codes, piece.scales]
  for array in arrays:
    # All copies are on their way before the first is waited for. (A CPU's
    # arrays need none, and with many small ones it is this that takes time.)
    if isinstance(array, jax.Array) and not _is_on_cpu(array):
      array.copy_to_host_async()
  return [_little_endian(np.asarray(array)) for array in arrays]


def from_bytes(codec: Codec, shapes: ShapeTree, data: Payload) -> Any:
  """Inverts `to_bytes`, without copying on little-endian hosts.

  Args:
    codec: the codec that encoded.
    shapes: pytree of shapes and dtypes that were encoded.
    data: the payload.

  Returns:
    Pytree like `shapes`, of `Encoded` with NumPy arrays.

  Raises:
    ValueError: the payload does not have the length of this layout.
  """
  view = memoryview(data).cast('B')
  leaves, structure = jax.tree.flatten(shapes)
  layouts = _layouts(codec, leaves)
  expected = sum(layout.nbytes for layout, _ in layouts)
  if view.nbytes != expected:
    raise ValueError(
      f'Payload: expected {expected} bytes for codec {codec.name} and this '
      f'layout of {len(layouts)} pieces, got {view.nbytes}; sender and '
      'receiver must use one codec, block size and fragment plan.'
    )
  pieces = []
  for shape, (layout, dtype) in zip(leaves, layouts, strict=True):
    middle = layout.offset + layout.codes_nbytes
    pieces.append(
      Encoded(
        codes=_from_little_endian(view[layout.offset : middle], dtype),
        scales=_from_little_endian(
          view[middle : layout.offset + layout.nbytes], _SCALE_DTYPE
        ),
        shape=tuple(shape.shape),
        dtype=np.dtype(shape.dtype),
      )
    )
  return structure.unflatten(pieces)


def _layouts(
  codec: Codec, leaves: Sequence[Any]
) -> list[tuple[PieceLayout, np.dtype]]:
  """Where each piece lies, and the dtype of its codes."""
  layouts = []
  offset = 0
  for shape in leaves:
    num_codes, dtype, num_scales = codec.wire_layout(math.prod(shape.shape))
    dtype = np.dtype(dtype)
    layout = PieceLayout(offset, num_codes * dtype.itemsize, num_scales)
    layouts.append((layout, dtype))
    offset += layout.nbytes
  return layouts


def _is_on_cpu(array: jax.Array) -> bool:
  return next(iter(array.sharding.device_set)).platform == 'cpu'


def _little_endian(array: np.ndarray) -> memoryview:
  """The bytes of a flat array; no copy on little-endian hosts."""
  if sys.byteorder == 'big' and array.itemsize > 1:
    array = array.byteswap()
  return np.ascontiguousarray(array).view(np.uint8).data


def _from_little_endian(view: memoryview, dtype: Any) -> np.ndarray:
  array = np.frombuffer(view, dtype)
  return array.byteswap() if sys.byteorder == 'big' else array
