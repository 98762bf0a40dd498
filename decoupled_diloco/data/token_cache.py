"""Tokens on disk: written once, mapped into memory by every later process.

An entry is a folder that appears by one rename, when it is complete. Processes
that build the same entry at the same time do not wait for each other: the
first rename wins, and the others use its entry and drop their own.
"""

import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Integer

PARTS = ('train', 'held_out')


class Entry(NamedTuple):
  """One entry of the cache.

  Attributes:
    train: tokens, mapped read-only.
    held_out: tokens, mapped read-only.
    summary: what the builder returned.
  """

  train: Integer[np.ndarray, ' token']
  held_out: Integer[np.ndarray, ' token']
  summary: dict[str, Any]


def open_or_build(
  cache_dir: str,
  key: str,
  dtype: np.dtype,
  build: Callable[[BinaryIO, BinaryIO], dict[str, Any]],
) -> Entry:
  """Returns the entry of `key`, which it builds if it is not there.

  Args:
    cache_dir: a local folder; made if missing. Entries are never evicted.
    key: a file name that changes with everything that the tokens depend on.
    dtype: of the tokens.
    build: writes the tokens to the two files (train, held out) and returns a
      JSON-able summary.

  Raises:
    ValueError: if the folder cannot be used, or an entry has been damaged.
  """
  entry = pathlib.Path(cache_dir).expanduser() / key
  if not entry.is_dir():
    try:
      _build(entry, build)
    except OSError as error:
      raise ValueError(
        f'cache_dir={cache_dir!r} must be a writable local folder with room '
        f'for the tokens ({error}); make room, choose another one, or '
        'set cache_dir=None to keep the tokens in memory.'
      ) from error
  return _open(entry, dtype)


def _build(
  entry: pathlib.Path,
  build: Callable[[BinaryIO, BinaryIO], dict[str, Any]],
) -> None:
  entry.parent.mkdir(parents=True, exist_ok=True)
  # In the same folder, so that the rename stays within one file system.
  unfinished = pathlib.Path(
    tempfile.mkdtemp(prefix='unfinished-', dir=entry.parent)
  )
  try:
    with (
      (unfinished / PARTS[0]).open('wb') as train,
      (unfinished / PARTS[1]).open('wb') as held_out,
    ):
      summary = build(train, held_out)
      sizes = [train.tell(), held_out.tell()]
    (unfinished / 'summary.json').write_text(
      json.dumps({'summary': summary, 'sizes_bytes': sizes})
    )
    try:
      unfinished.rename(entry)
    except OSError:
      # A folder that holds files cannot be renamed over: another process was
      # first, and its tokens are the same ones.
      if not entry.is_dir():
        raise
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)


def _open(entry: pathlib.Path, dtype: np.dtype) -> Entry:
  try:
    record = json.loads((entry / 'summary.json').read_text())
    sizes = [(entry / part).stat().st_size for part in PARTS]
    if sizes != record['sizes_bytes']:
      raise ValueError(f'sizes are {sizes}, not {record["sizes_bytes"]}')
  except (OSError, ValueError, KeyError) as error:
    raise ValueError(
      f'the token cache {entry} must be as it was written, and is damaged '
      f'({error}); delete this folder and start again.'
    ) from error
  train, held_out = (
    # An empty file cannot be mapped.
    np.memmap(entry / part, dtype, mode='r') if size else np.empty(0, dtype)
    for part, size in zip(PARTS, sizes, strict=True)
  )
  return Entry(train, held_out, record['summary'])
