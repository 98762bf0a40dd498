"""A folder in which one process at a time works."""

import fcntl
import os
import pathlib

_NAME = 'lock'


class FolderLock:
  """Holds a folder until it is released, or the process has ended, however.

  Args:
    folder: which one; local.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    self._folder = pathlib.Path(folder)
    self._file: int | None = None

  def acquire(self) -> None:
    """Makes the folder, unless it is there, and takes hold of it.

    Raises:
      BlockingIOError: if somebody else holds it.
      OSError: if it cannot be made or written.
    """
    self._folder.mkdir(parents=True, exist_ok=True)
    file = os.open(self._folder / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      os.close(file)
      raise
    self._file = file

  def release(self) -> None:
    """Lets go of it; a second time does nothing."""
    if self._file is not None:
      os.close(self._file)
      self._file = None
