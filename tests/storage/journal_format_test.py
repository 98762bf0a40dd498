"""Whole records are found, and nothing else is taken for one."""

import struct

import pytest

from decoupled_diloco.storage.journal_format import (
  HEAD_BYTES,
  RECORD_HEAD_BYTES,
  SegmentHead,
  has_record_behind,
  head_bytes,
  read_head,
  record_head,
  whole_records,
)
from tests.storage import journal_oracle
from tests.storage.crashing_disk import CrashingDisk

HEAD = SegmentHead(first=0, owner=journal_oracle.OWNER)


def file_of(data):
  disk = CrashingDisk()
  file = disk.create('folder/file')
  disk.write(file, 0, data)
  return disk, file


def test_bytes_are_those_of_the_oracle():
  payloads = [b'abc', b'', b'defgh']
  data = head_bytes(HEAD)
  assert len(data) == HEAD_BYTES
  for number, payload in enumerate(payloads):
    head = record_head(number, payload[:2], memoryview(payload[2:]))
    assert len(head) == RECORD_HEAD_BYTES
    data += head + payload
  assert data == journal_oracle.segment(payloads)
  assert list(whole_records(*file_of(data), 0)) == payloads


def test_a_head_with_a_flipped_bit_is_none():
  data = head_bytes(SegmentHead(first=2**40, owner=2**64 - 1))
  assert read_head(data) == (2**40, 2**64 - 1)
  for at in range(8 * len(data)):
    flipped = bytearray(data)
    flipped[at // 8] ^= 1 << (at % 8)
    assert read_head(bytes(flipped)) is None


def test_a_record_at_a_wrong_place_is_none():
  data = journal_oracle.segment([b'abc', b'def'])
  assert list(whole_records(*file_of(data), 0)) == [b'abc', b'def']
  assert list(whole_records(*file_of(data), 1)) == []


# The mark before the border of what is searched at a time, across, and behind.
@pytest.mark.parametrize('distance', [0, 3, *range(2**20 - 5, 2**20 + 3)])
def test_a_record_behind_damage_is_found(distance):
  record = record_head(5, b'abc') + b'abc'
  disk, file = file_of(b'?' + bytes(distance) + record + b'more')
  assert has_record_behind(disk, file, 0)
  disk, file = file_of(b'?' + bytes(distance) + record[:-1])
  assert not has_record_behind(disk, file, 0)


@pytest.mark.parametrize('length', [1, 2**20, 2**31, 2**32 - 1])
def test_a_length_that_is_not_there_is_not_read(length):
  # The oracle's disk refuses to be asked for more than the file has.
  data = journal_oracle.segment([b'abc'])
  record = b'rec\xa9' + struct.pack('<IQQ', length, 1, 0)
  assert journal_oracle.read(data + record) == [b'abc']
  # Nor when a record is looked for behind the damage.
  assert journal_oracle.read(data + b'?' + record) == [b'abc']
