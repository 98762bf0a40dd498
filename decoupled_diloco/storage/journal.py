"""A journal: records that are on disk before anybody hears of them.

Records are numbered from 0 over the whole run and lie in segments, files that
are named by their first record. A snapshot makes earlier records superfluous: a
new segment is begun at it, and the older ones are removed when it is complete.

  segment = MAGIC, first number, owner, checksum of these; then records
  record  = MARK, length, number, checksum of number and payload, payload

All numbers are little-endian. The owner is a number that belongs to one run, so
that no other run's journal is taken for one's own. A segment gets its name only
when its head is on disk, so all named segments have one.

A record is on disk before the next one is begun. So a crash leaves at most one
that is not whole, and that is the last: it is cut off when the journal is
opened. A damaged record with a whole one behind it has another cause; then
nothing is cut, for what would be lost had been published.
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
_SUFFIX = '.journal'
_UNFINISHED = '.unfinished'
MAX_RECORD_BYTES = 2**32 - 1


class JournalError(ValueError):
  """The journal is damaged, or another's; says what to do."""


class Cut(NamedTuple):
  """What was cut off the end of a journal.

  Attributes:
    path: of the segment.
    offset: where its last whole record ends.
    num_bytes: how many bytes came behind it.
  """

  path: str
  offset: int
  num_bytes: int


class _Segment(NamedTuple):
  first: int
  path: str


class Journal:
  """Appends records, and reads them again.

  Not thread-safe.

  Attributes:
    next_number: of the record that is appended next.
    cut: what was cut off when it was opened; None if nothing was.
  """

  def __init__(self, folder: str, owner: int, disk: Disk | None = None):
    """Opens a journal, or begins one.

    Args:
      folder: where its segments lie; local, for buckets cannot append.
      owner: of the run, in [0, 2**64).
      disk: the file system.

    Raises:
      JournalError: if it is damaged, or belongs to another run.
      OSError: if it cannot be read or written.
    """
    self._disk = disk or Disk()
    self._folder = folder
    self._owner = owner
    self._is_broken = False
    self._file: int | None = None
    self.cut: Cut | None = None
    self._disk.make_folder(folder)
    self._segments = self._find_segments()
    if self._segments:
      self._open_last()
    else:
      self.next_number = 0
      self.begin_segment()

  @property
  def num_bytes(self) -> int:
    """Size of the segment that is being written."""
    return self._end

  # Writing.

  def append(self, *parts: bytes | memoryview) -> int:
    """Writes a record; when this returns, it survives a loss of power.

    Args:
      parts: the payload is these, one after the other.

    Returns:
      Its number.

    Raises:
      ValueError: if it is longer than `MAX_RECORD_BYTES`.
      OSError: if there is no room, and the journal is as it was before; or if
        the disk fails. What it holds then only opening it again tells, and
        until then nothing more is taken.
    """
    file = self._writable()
    length = sum(memoryview(part).nbytes for part in parts)
    if length > MAX_RECORD_BYTES:
      raise ValueError(
        f'a record of {length} bytes is longer than the largest possible of '
        f'{MAX_RECORD_BYTES}; use more fragments.'
      )
    number = self.next_number
    head = _RECORD.pack(_MARK, length, number, _checksum(number, *parts))
    self._is_broken = True  # Until it is known to be whole.
    end = self._end
    try:
      for part in (head, *parts):
        self._disk.write(file, end, part)
        end += memoryview(part).nbytes
    except OSError:
      self._disk.truncate(file, self._end)
      self._is_broken = False
      raise
    self._disk.sync(file)
    self._is_broken = False
    self._end = end
    self.next_number += 1
    return number

  def begin_segment(self) -> None:
    """Goes on in a new file, so that older ones can be removed as a whole.

    Raises:
      OSError: if it cannot be written; the journal goes on in the old file. If
        it has its name, but perhaps not on disk, nothing more is taken before
        the journal is opened again.
    """
    if self._segments and self._segments[-1].first == self.next_number:
      return  # It is empty.
    path = self._path(self.next_number)
    unfinished = path + _UNFINISHED
    file = self._disk.create(unfinished)
    try:
      head = _head(self.next_number, self._owner)
      self._disk.write(file, 0, head)
      self._disk.sync(file)
      self._disk.rename(unfinished, path)
      # Whoever opens the journal believes the name: what the old file took from
      # here on would be lost.
      was_broken, self._is_broken = self._is_broken, True
      self._disk.sync_folder(self._folder)
      self._is_broken = was_broken
    except OSError:
      self._disk.close(file)
      raise
    if self._file is not None:
      self._disk.close(self._file)
    self._file = file
    self._end = len(head)
    self._segments.append(_Segment(self.next_number, path))

  def remove_before(self, number: int) -> None:
    """Removes segments all of whose records are older than this one.

    Raises:
      OSError: if the file system refuses.
    """
    while len(self._segments) > 1 and self._segments[1].first <= number:
      # The oldest first: what is left has no gap, whenever this ends.
      self._disk.remove(self._segments[0].path)
      del self._segments[0]
      self._disk.sync_folder(self._folder)

  def close(self) -> None:
    """Closes the file."""
    if self._file is not None:
      self._disk.close(self._file)
      self._file = None

  def _writable(self) -> int:
    if self._file is None or self._is_broken:
      why = 'closed' if self._file is None else 'broken by an earlier failure'
      raise OSError(f'the journal in {self._folder} is {why}; open it again.')
    return self._file

  # Reading.

  @property
  def first_number(self) -> int:
    """The oldest record that is still there, or would be."""
    return self._segments[0].first

  def records(self, first: int) -> Iterator[tuple[int, bytes]]:
    """Yields (number, payload) from a record on.

    Args:
      first: from `first_number` to `next_number`.

    Raises:
      JournalError: if records are missing or damaged.
      OSError: if it cannot be read.
    """
    if not self.first_number <= first <= self.next_number:
      raise JournalError(
        f'record {first} is not in the journal {self._folder}, which holds '
        f'records {self.first_number} to {self.next_number - 1}; restore the '
        'snapshot that belongs to it.'
      )
    for index, segment in enumerate(self._segments):
      is_last = index + 1 == len(self._segments)
      end = self.next_number if is_last else self._segments[index + 1].first
      if end <= first:
        continue
      file = self._disk.open(segment.path)
      try:
        number = segment.first
        for payload in _whole_records(self._disk, file, number):
          if number >= end:
            break
          if number >= first:
            yield number, payload
          number += 1
        if number < end:
          raise _damaged(segment.path, number)
      finally:
        self._disk.close(file)

  # Opening.

  def _path(self, number: int) -> str:
    return f'{self._folder}/{number:020}{_SUFFIX}'

  def _find_segments(self) -> list[_Segment]:
    segments = []
    for name in self._disk.names(self._folder):
      path = f'{self._folder}/{name}'
      if name.endswith(_UNFINISHED):
        self._disk.remove(path)
      elif name.endswith(_SUFFIX):
        segments.append(_Segment(self._read_head(path), path))
    return segments

  def _read_head(self, path: str) -> int:
    """The number of a segment's first record."""
    file = self._disk.open(path)
    try:
      head = self._disk.read(file, 0, _HEAD.size)
    finally:
      self._disk.close(file)
    if len(head) < _HEAD.size:
      raise JournalError(f'{path} has no head; {_RESTORE}')
    magic, first, owner, _ = _HEAD.unpack(head)
    if magic != _MAGIC or head != _head(first, owner):
      raise JournalError(f'the head of {path} is damaged; {_RESTORE}')
    if owner != self._owner:
      raise JournalError(
        f'{path} belongs to another run; give each run a folder of its own.'
      )
    if path != self._path(first):
      raise JournalError(
        f'{path} begins with record {first} and was renamed; name it '
        f'{self._path(first)}.'
      )
    return first

  def _open_last(self) -> None:
    segment = self._segments[-1]
    file = self._disk.open(segment.path)
    end, number = _HEAD.size, segment.first
    for payload in _whole_records(self._disk, file, number):
      end += _RECORD.size + len(payload)
      number += 1
    excess = self._disk.size(file) - end
    if excess:
      if _has_record_behind(self._disk, file, end):
        self._disk.close(file)
        raise _damaged(segment.path, number)
      self._disk.truncate(file, end)
      self.cut = Cut(segment.path, end, excess)
    # What a crash left unsynchronised may have been read from memory alone.
    self._disk.sync(file)
    self._file, self._end = file, end
    self.next_number = number


_RESTORE = (
  'restore it from a copy, or begin again from an older snapshot without the '
  'journal.'
)


def _damaged(path: str, number: int) -> JournalError:
  return JournalError(
    f'record {number} in {path} is damaged, and it is not the last one, so '
    f'that no crash explains it; {_RESTORE}'
  )


def _head(first: int, owner: int) -> bytes:
  without = _HEAD.pack(_MAGIC, first, owner, 0)[:-8]
  return without + struct.pack('<Q', xxhash.xxh3_64_intdigest(without))


def _checksum(number: int, *parts: bytes | memoryview) -> int:
  # With the number, so that a record at a wrong place is found out.
  digest = xxhash.xxh3_64(seed=number)
  for part in parts:
    digest.update(part)
  return digest.intdigest()


def _whole_records(disk: Disk, file: int, number: int) -> Iterator[bytes]:
  """Yields the payloads of a segment until one is not whole."""
  offset, size = _HEAD.size, disk.size(file)
  while payload := _record_at(disk, file, offset, size, number):
    yield payload[_RECORD.size :]
    offset += len(payload)
    number += 1


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


def _has_record_behind(disk: Disk, file: int, offset: int) -> bool:
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
