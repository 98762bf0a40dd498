"""How a journal's segments and records lie on disk.

  segment = MAGIC, first number, owner, checksum of these; then records
  record  = MARK, length, number, checksum of number and payload, payload

All numbers are little-endian. The owner is a number that belongs to one run, so
that no other run's journal is taken for one's own.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from decoupled_diloco.storage.disk import Disk

_MAGIC = b'ddljrnl1'
_HEAD = struct.Struct('<8sQQQ')  # Magic, first number, owner, checksum.
_MARK = b'rec\xa9'
_RECORD = struct.Struct('<4sIQQ')  # Mark, length, number, checksum.
_SEARCHED_BYTES = 2**20  # At a time.
HEAD_BYTES = _HEAD.size
RECORD_HEAD_BYTES = _RECORD.size
MAX_RECORD_BYTES = 2**32 - 1


class SegmentHead(NamedTuple):
  """What a segment begins with.

  Attributes:
    first: number of its first record.
    owner: whose journal it belongs to, in [0, 2**64).
  """

  first: int
  owner: int


def head_bytes(head: SegmentHead) -> bytes:
  """A segment's head as it lies on disk: `HEAD_BYTES` of them."""
  without = _HEAD.pack(_MAGIC, head.first, head.owner, 0)[:-8]
  return without + struct.pack('<Q', xxhash.xxh3_64_intdigest(without))


def read_head(data: bytes) -> SegmentHead | None:
  """Inverts `head_bytes`; None if it is damaged."""
  magic, first, owner, _ = _HEAD.unpack(data)
  head = SegmentHead(first, owner)
  return head if magic == _MAGIC and data == head_bytes(head) else None


def record_head(number: int, *parts: bytes | memoryview) -> bytes:
  """What lies before a record's payload: `RECORD_HEAD_BYTES` of them.

  Args:
    number: of the record.
    parts: the payload is these, one after the other.

  Raises:
    ValueError: if it is longer than `MAX_RECORD_BYTES`.
  """
  length = sum(memoryview(part).nbytes for part in parts)
  if length > MAX_RECORD_BYTES:
    raise ValueError(
      f'a record of {length} bytes is longer than the largest possible of '
      f'{MAX_RECORD_BYTES}; use more fragments.'
    )
  return _RECORD.pack(_MARK, length, number, _checksum(number, *parts))


def whole_records(disk: Disk, file: int, number: int) -> Iterator[bytes]:
  """Yields the payloads of a segment until one is not whole."""
  offset, size = _HEAD.size, disk.size(file)
  while payload := _record_at(disk, file, offset, size, number):
    yield payload[_RECORD.size :]
    offset += len(payload)
    number += 1


def has_record_behind(disk: Disk, file: int, offset: int) -> bool:
  """Whether anything behind a damaged record is a whole one."""
  size = disk.size(file)
  offset += 1
  while chunk := disk.read(file, offset, _SEARCHED_BYTES + len(_MARK) - 1):
    at = chunk.find(_MARK)
    while at >= 0:
      if _record_at(disk, file, offset + at, size, None):
        return True
      at = chunk.find(_MARK, at + 1)
    offset += _SEARCHED_BYTES
  return False


def _checksum(number: int, *parts: bytes | memoryview) -> int:
  # With the number, so that a record at a wrong place is found out.
  digest = xxhash.xxh3_64(seed=number)
  for part in parts:
    digest.update(part)
  return digest.intdigest()


def _record_at(
  disk: Disk, file: int, offset: int, size: int, number: int | None
) -> bytes:
  """A whole record of this or any number, with its head; empty if none."""
  head = disk.read(file, offset, _RECORD.size)
  if len(head) < _RECORD.size:
    return b''
  mark, length, found, checksum = _RECORD.unpack(head)
  if mark != _MARK or number not in (None, found):
    return b''
  if length > size - offset - _RECORD.size:
    return b''  # Before anything is read: it may be any number.
  payload = disk.read(file, offset + _RECORD.size, length)
  if len(payload) < length or _checksum(found, payload) != checksum:
    return b''
  return head + payload
