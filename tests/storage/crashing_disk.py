"""A disk that forgets what was not synchronised when the machine dies."""

import random

from decoupled_diloco.storage.disk import Disk


class Crashed(BaseException):
  """The machine is dead; nothing of ours catches this."""


class _File:
  """What is on the platter, and what was written since."""

  def __init__(self):
    self.synced = b''
    self.data = bytearray()
    self.changes: list[tuple[int, bytes | None]] = []  # None: cut there.

  def apply(self, offset: int, data: bytes | None) -> None:
    self.data = _changed(self.data, offset, data)
    self.changes.append((offset, data))

  def sync(self) -> None:
    self.synced = bytes(self.data)
    self.changes.clear()

  def after_crash(self, rng: random.Random) -> '_File':
    """Any of the changes since may have reached the platter, in part."""
    data = bytearray(self.synced)
    for offset, change in self.changes:
      if rng.random() < 0.5:
        continue
      if change is not None and rng.random() < 0.5:
        change = change[: rng.randrange(len(change) + 1)]
      data = _changed(data, offset, change)
    file = _File()
    file.data, file.synced = data, bytes(data)
    return file


def _changed(data: bytearray, offset: int, change: bytes | None) -> bytearray:
  if change is None:
    return data[:offset]
  data = data + bytes(max(offset - len(data), 0))
  return data[:offset] + change + data[offset + len(change) :]


class CrashingDisk(Disk):
  """One folder, in memory.

  Args:
    crash_at: number of the operation that the machine dies in; each that
      changes something counts. None: never.
  """

  def __init__(self, crash_at: int | None = None):
    self.crash_at = crash_at
    self.operations = 0
    self._names: dict[str, _File] = {}
    self._synced_names: dict[str, _File] = {}
    self._pending: list[dict[str, _File]] = []  # Later states of the folder.
    self._open: dict[int, _File] = {}

  def after_crash(self, seed: int) -> 'CrashingDisk':
    """What somebody finds who switches the machine on again."""
    rng = random.Random(seed)
    names = rng.choice([self._synced_names, *self._pending])
    disk = CrashingDisk()
    disk._names = {name: file.after_crash(rng) for name, file in names.items()}
    disk._synced_names = dict(disk._names)
    return disk

  def _operate(self) -> None:
    self.operations += 1
    if self.operations == self.crash_at:
      raise Crashed

  def _rename(self, names: dict[str, _File]) -> None:
    self._names = names
    self._pending.append(dict(names))

  def make_folder(self, folder):
    """It is there."""

  def names(self, folder):
    """See `Disk`."""
    return sorted(path.removeprefix(f'{folder}/') for path in self._names)

  def create(self, path):
    """See `Disk`."""
    self._operate()
    self._rename({**self._names, path: _File()})
    return self.open(path)

  def open(self, path):
    """See `Disk`."""
    number = max(self._open, default=0) + 1
    self._open[number] = self._names[path]
    return number

  def close(self, file):
    """See `Disk`."""
    del self._open[file]

  def size(self, file):
    """See `Disk`."""
    return len(self._open[file].data)

  def read(self, file, offset, count):
    """See `Disk`."""
    return bytes(self._open[file].data[offset : offset + count])

  def write(self, file, offset, data):
    """Dies when it is half done."""
    self._open[file].apply(offset, bytes(data[: len(data) // 2]))
    self._operate()
    self._open[file].apply(offset, bytes(data))

  def truncate(self, file, size):
    """See `Disk`."""
    self._operate()
    self._open[file].apply(size, None)

  def sync(self, file):
    """See `Disk`."""
    self._operate()
    self._open[file].sync()

  def rename(self, old, new):
    """See `Disk`."""
    self._operate()
    names = {name: f for name, f in self._names.items() if name != old}
    self._rename({**names, new: self._names[old]})

  def remove(self, path):
    """See `Disk`."""
    self._operate()
    self._rename({n: f for n, f in self._names.items() if n != path})

  def sync_folder(self, folder):
    """See `Disk`."""
    self._operate()
    self._synced_names = dict(self._names)
    self._pending.clear()
