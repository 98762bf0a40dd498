"""Files that only grow, record by record, and survive a kill at any instant.

A record is written with one `write()`, unbuffered, so a killed process leaves
at most one unfinished record, at the end. Whoever opens the file next cuts that
remnant off before it appends.
"""

import os
import pathlib

_BLOCK = 1 << 16


class AppendedFile:
  """A file of records, open for appending.

  Attributes:
    path: where it lies.
    size: its size in bytes.
    cut_bytes: size of the unfinished record that was cut off at the opening.
  """

  def __init__(
    self, path: str | os.PathLike[str], *, begins: bytes, ends: bytes
  ):
    """Opens or makes the file, and its folder.

    Args:
      path: where it lies or shall lie.
      begins: what every such file begins with, so that another one is not
        damaged by mistake.
      ends: what every whole record ends with, and holds nowhere else; its last
        byte is a line feed.

    Raises:
      ValueError: if the file is there and is another kind of file.
    """
    self.path = pathlib.Path(path)
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self._file = self.path.open('ab+', buffering=0)
    try:
      before = self._file.seek(0, os.SEEK_END)
      self.size = self._whole_size(before, begins, ends)
      self.cut_bytes = before - self.size
      if self.cut_bytes:
        self._file.truncate(self.size)
    except BaseException:
      self._file.close()
      raise

  def append(self, record: bytes) -> None:
    """Writes one whole record, or nothing.

    Raises:
      OSError: if it could not be written, most often for want of disk space;
        what was written of it is taken back.
    """
    left = memoryview(record)
    try:
      while left:
        left = left[self._file.write(left) :]
    except OSError as error:
      self._file.truncate(self.size)
      raise OSError(
        error.errno,
        f'{error.strerror}; free some space or choose another folder',
        str(self.path),
      ) from error
    self.size += len(record)

  def close(self) -> None:
    """Closes the file; a second time does nothing."""
    self._file.close()

  def _whole_size(self, size: int, begins: bytes, ends: bytes) -> int:
    """How much of the file is whole records."""
    self._file.seek(0)
    start = self._file.read(len(begins)) or b''
    if not begins.startswith(start):
      raise ValueError(
        f'{self.path} begins with {start!r} and not with {begins!r}: it is '
        'another kind of file; move it away or choose another path.'
      )
    until, tail = size, b''
    has_line = False
    while until > 0:
      since = max(0, until - _BLOCK)
      self._file.seek(since)
      block = (self._file.read(until - since) or b'') + tail
      found = block.rfind(ends)
      if found >= 0:
        return since + found + len(ends)
      has_line = has_line or b'\n' in block
      # An end may lie across two blocks.
      until, tail = since, block[: len(ends) - 1]
    if has_line:
      raise ValueError(
        f'{self.path} holds lines but no whole record (which ends with '
        f'{ends!r}); an editor may have changed it; move it away.'
      )
    return 0
