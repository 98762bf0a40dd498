"""The few things that the journal asks of a file system.

They are methods of an object so that a test can put a simulated disk in its
place, which forgets what was not synchronised.
"""

import os
import pathlib


class Disk:
  """Files of the operating system, by descriptor.

  All methods raise OSError.
  """

  def make_folder(self, folder: str) -> None:
    """Makes a folder, with its parents, unless it is there."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)

  def names(self, folder: str) -> list[str]:
    """The files of a folder, sorted."""
    return sorted(path.name for path in pathlib.Path(folder).iterdir())

  def create(self, path: str) -> int:
    """Makes an empty file, or empties one; open for reading and writing."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

  def open(self, path: str) -> int:
    """Opens a file for reading and writing."""
    return os.open(path, os.O_RDWR)

  def close(self, file: int) -> None:
    """Closes a file; what was not synchronised may still be lost."""
    os.close(file)

  def size(self, file: int) -> int:
    """Length in bytes."""
    return os.fstat(file).st_size

  def read(self, file: int, offset: int, count: int) -> bytes:
    """So many bytes from there on; fewer at the end of the file."""
    parts: list[bytes] = []
    while count > 0 and (part := os.pread(file, count, offset)):
      parts.append(part)
      offset += len(part)
      count -= len(part)
    return b''.join(parts)

  def write(self, file: int, offset: int, data: bytes | memoryview) -> None:
    """Writes all of the data there; on an error, a part of it may be there."""
    rest = memoryview(data)
    while rest:
      written = os.pwrite(file, rest, offset)
      offset += written
      rest = rest[written:]

  def truncate(self, file: int, size: int) -> None:
    """Cuts a file to so many bytes."""
    os.ftruncate(file, size)

  def sync(self, file: int) -> None:
    """Returns when everything written to the file survives a loss of power."""
    os.fsync(file)

  def rename(self, old: str, new: str) -> None:
    """Gives a file another name; one of that name is replaced."""
    pathlib.Path(old).replace(new)

  def remove(self, path: str) -> None:
    """Removes a file."""
    pathlib.Path(path).unlink()

  def sync_folder(self, folder: str) -> None:
    """Returns when names that were made or removed survive a loss of power."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
      os.fsync(file)
    finally:
      os.close(file)
