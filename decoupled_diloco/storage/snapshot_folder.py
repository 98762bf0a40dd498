"""Numbered snapshots in a folder, of which the newest sound one counts.

  00000000000000000042/   arrays by name, and a JSON description with their
                          checksum

A snapshot has its name only when it is whole and on disk. One whose content has
changed since is found out by its checksum, and the one before counts.
"""

import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from decoupled_diloco.storage import snapshots

_NAME = re.compile(r'\d{20}')
# The end of the name of one that counts no more, and is for people to look at.
_ASIDE = '.aside'


class Found(NamedTuple):
  """A snapshot that was read.

  Attributes:
    number: its number.
    arrays: by name.
    description: as it was given to `save`.
    damaged: the numbers of newer ones that are not sound.
    notes: sentences for people about those.
  """

  number: int
  arrays: Mapping[str, Any]
  description: Mapping[str, Any]
  damaged: tuple[int, ...]
  notes: tuple[str, ...]


class NoSoundSnapshotError(ValueError):
  """There are snapshots, and all are damaged; says what is wrong with them."""


class SnapshotFolder:
  """The snapshots of one kind.

  Args:
    folder: where they lie; local. It is made when the first is saved.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    self.folder = pathlib.Path(folder)

  def numbers(self) -> list[int]:
    """Of the whole ones, in order."""
    if not self.folder.is_dir():
      return []
    names = (path.name for path in self.folder.iterdir())
    return sorted(int(name) for name in names if _NAME.fullmatch(name))

  def path(self, number: int) -> pathlib.Path:
    """Where the snapshot of a number lies."""
    return self.folder / f'{number:020}'

  def save(
    self,
    number: int,
    arrays: Mapping[str, Any],
    description: Mapping[str, Any],
  ) -> None:
    """Saves a snapshot; it is on disk when this returns.

    Raises:
      OSError: if it cannot be written.
    """
    text = json.dumps(description)
    sealed = {
      'text': text,
      'text_checksum': xxhash.xxh3_64_hexdigest(text.encode()),
      'checksum': _checksum(arrays),
    }
    snapshots.save(str(self.path(number)), dict(arrays), sealed)

  def describe(self, number: int) -> Mapping[str, Any]:
    """The description alone.

    Raises:
      snapshots.DamagedError: if it cannot be read.
    """
    return _unsealed(snapshots.describe(str(self.path(number))))

  def newest(
    self,
    like: Mapping[str, Any],
    check: Callable[[Mapping[str, Any]], None] = lambda description: None,
  ) -> Found | None:
    """Reads the newest that is sound; None if there is none at all.

    Nothing is changed: the folder may be another process's, which meanwhile
    removes what is read here.

    Args:
      like: shapes, dtypes and shardings of the arrays.
      check: raises what it likes if the description is not what it should be.

    Raises:
      NoSoundSnapshotError: if all that there are are damaged.
    """
    notes: list[str] = []
    damaged: list[int] = []
    for number in reversed(self.numbers()):
      path = self.path(number)
      try:
        description = self.describe(number)
        check(description)
        arrays, sealed = snapshots.restore(str(path), like)
        if sealed['checksum'] != _checksum(arrays):
          raise snapshots.DamagedError('its checksum is wrong')
      except (snapshots.DamagedError, OSError) as error:
        notes.append(f'The snapshot {path} is damaged ({error}).')
        damaged.append(number)
        continue
      return Found(number, arrays, description, tuple(damaged), tuple(notes))
    if damaged:
      raise NoSoundSnapshotError(' '.join(notes))
    return None

  def set_aside(self, numbers: Iterable[int]) -> None:
    """Gives snapshots another name, so that they count no more.

    Raises:
      OSError: if that cannot be.
    """
    for number in numbers:
      path = self.path(number)
      aside = path.with_name(path.name + _ASIDE)
      if aside.exists():
        snapshots.remove(str(aside))
      path.rename(aside)

  def tidy(self, keep: int) -> int:
    """Removes all but the newest, and what is left of unfinished ones.

    Args:
      keep: how many to keep.

    Returns:
      The number of the oldest that is left.

    Raises:
      OSError: if something cannot be removed.
    """
    numbers = self.numbers()[-keep:]
    kept = {self.path(number).name for number in numbers}
    for path in self.folder.iterdir():
      if path.name not in kept and not path.name.endswith(_ASIDE):
        snapshots.remove(str(path))
    return numbers[0]


def num_bytes(arrays: Mapping[str, Any]) -> int:
  """How much arrays hold."""
  return sum(array.nbytes for array in arrays.values())


def _unsealed(sealed: Mapping[str, Any]) -> Mapping[str, Any]:
  text = sealed.get('text', '')
  if sealed.get('text_checksum') != xxhash.xxh3_64_hexdigest(text.encode()):
    raise snapshots.DamagedError('the checksum of its description is wrong')
  return json.loads(text)


def _checksum(arrays: Mapping[str, Any]) -> str:
  digest = xxhash.xxh3_64()
  for name in sorted(arrays):
    digest.update(name.encode())
    digest.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
  return digest.hexdigest()
