"""A journal: records that are on disk before anybody hears of them.

Records are numbered from 0 over the whole run and lie in segments, files that
are named by their first record. A snapshot makes earlier records superfluous: a
new segment is begun at it, and the older ones are removed when it is complete.
(What these look like, `journal_format` tells.) A segment gets its name only
when its head is on disk, so all named segments have one.

A record is on disk before the next one is begun. So a crash leaves at most one
that is not whole, and that is the last: it is cut off when the journal is
opened. A damaged record with a whole one behind it has another cause; then
nothing is cut, for what would be lost had been published.
"""

from collections.abc import Iterator
from typing import NamedTuple

from decoupled_diloco.storage.disk import Disk
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

_SUFFIX = '.journal'
_UNFINISHED = '.unfinished'


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
    number = self.next_number
    head = record_head(number, *parts)
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
      head = head_bytes(SegmentHead(self.next_number, self._owner))
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
        for payload in whole_records(self._disk, file, number):
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
      data = self._disk.read(file, 0, HEAD_BYTES)
    finally:
      self._disk.close(file)
    if len(data) < HEAD_BYTES:
      raise JournalError(f'{path} has no head; {_RESTORE}')
    head = read_head(data)
    if head is None:
      raise JournalError(f'the head of {path} is damaged; {_RESTORE}')
    if head.owner != self._owner:
      raise JournalError(
        f'{path} belongs to another run; give each run a folder of its own.'
      )
    if path != self._path(head.first):
      raise JournalError(
        f'{path} begins with record {head.first} and was renamed; name it '
        f'{self._path(head.first)}.'
      )
    return head.first

  def _open_last(self) -> None:
    segment = self._segments[-1]
    file = self._disk.open(segment.path)
    end, number = HEAD_BYTES, segment.first
    for payload in whole_records(self._disk, file, number):
      end += RECORD_HEAD_BYTES + len(payload)
      number += 1
    excess = self._disk.size(file) - end
    if excess:
      if has_record_behind(self._disk, file, end):
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
