"""What the runs of a study gave, one JSON line each, kept as they end."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


class Results:
  """The file of results of a study; a run that is in it is not done again.

  Args:
    path: of the file; made when the first result is added.

  Raises:
    ValueError: if the file holds something else.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._by_key: dict[str, dict[str, Any]] = {}
    text = path.read_text(encoding='utf-8') if path.exists() else ''
    whole, _, torn = text.rpartition('\n')
    for line in whole.splitlines():
      try:
        result = json.loads(line)
        self._by_key[result['key']] = result
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
          f'{path} must hold one result per line, but has {line[:60]!r}; move '
          'the file away, and the study starts anew.'
        ) from error
    if torn:
      # The process was killed while it wrote; that run is done again.
      path.write_text(f'{whole}\n' if whole else '', encoding='utf-8')

  def __contains__(self, key: str) -> bool:
    return key in self._by_key

  def __len__(self) -> int:
    return len(self._by_key)

  def get(self, key: str) -> dict[str, Any] | None:
    """The result of a run, if it is there."""
    return self._by_key.get(key)

  def add(self, key: str, result: Mapping[str, Any]) -> None:
    """Keeps a result, on disk before this returns."""
    kept = {'key': key, **result}
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with self._path.open('a', encoding='utf-8') as file:
      file.write(json.dumps(kept) + '\n')
      file.flush()
      os.fsync(file.fileno())
    self._by_key[key] = kept
