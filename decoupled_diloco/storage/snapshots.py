"""Checkpoints of the global model, written by orbax and committed atomically.

A checkpoint is a folder with the parameters (`params`, an orbax PyTree that any
JAX program can restore) and a description (`description`, JSON). Orbax writes
beside it and renames, so a folder of that name is always whole.

A newer one that replaces it is first written whole under another name, then the
two change places. Whoever dies in between leaves either of them for `restore`
to find. (Orbax's own `force` removes the old one before it writes.)
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath


class DamagedError(ValueError):
  """A checkpoint that is there does not hold what it should."""


class Checkpoint(NamedTuple):
  """What a checkpoint holds.

  Attributes:
    params: pytree of parameters.
    description: JSON object: where the parameters come from.
  """

  params: Any
  description: Mapping[str, Any]


def save(
  folder: str, params: Any, description: Mapping[str, Any]
) -> epath.Path:
  """Writes a checkpoint; replaces one of the same name when it is complete.

  Args:
    folder: local path, or one like 'gs://bucket/name'.
    params: pytree of arrays.
    description: JSON object.

  Returns:
    The absolute path.

  Raises:
    OSError: if it cannot be written.
    ValueError: if the folder holds something else, or an array is empty.
  """
  path = epath.Path(folder).resolve()
  with _writing(path):
    if path.exists() and not _is_replaceable(path):
      raise ValueError(
        f'{path} is there already and is no checkpoint, so it is not replaced; '
        'choose another folder, or remove it.'
      )
    path.parent.mkdir(parents=True, exist_ok=True)
    newer, older = _newer(path), _older(path)
    if newer.exists() and not path.exists():
      newer.rename(path)  # As the one who died meant to.
    with ocp.Checkpointer(_handler()) as checkpointer:
      checkpointer.save(
        newer,
        args=ocp.args.Composite(
          params=ocp.args.StandardSave(params),
          description=ocp.args.JsonSave(dict(description)),
        ),
        force=True,
      )
    _synchronise(newer)
    if older.exists():
      older.rmtree()
    if path.exists():
      path.rename(older)
    newer.rename(path)
    _synchronise(path.parent, is_deep=False)
    if older.exists():
      older.rmtree()
  return path


def restore(folder: str, like: Any) -> Checkpoint:
  """Reads a checkpoint.

  Args:
    folder: as given to `save`.
    like: pytree of arrays or `jax.ShapeDtypeStruct`s, with the shardings that
      are wanted; values are converted to its dtypes.

  Raises:
    DamagedError: if it cannot be decoded, or is of other parameters.
    ValueError: if there is no checkpoint.
  """
  path = epath.Path(folder).resolve()
  found = [p for p in (path, _newer(path), _older(path)) if p.exists()]
  if not found:
    raise ValueError(
      f'there is no checkpoint at {path}; a run writes one when it ends.'
    )
  abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
  with ocp.Checkpointer(_handler()) as checkpointer:
    try:
      items = checkpointer.metadata(found[0]).item_metadata or {}
      stored = items.get('params')
      # Orbax would only find out in the middle of reading.
      _check_shapes(stored.tree if stored else {}, abstract)
      restored = checkpointer.restore(
        found[0],
        args=ocp.args.Composite(
          params=ocp.args.StandardRestore(abstract),
          description=ocp.args.JsonRestore(),
        ),
      )
    except (KeyError, ValueError) as error:
      raise DamagedError(
        f'the checkpoint at {path} does not hold these parameters: '
        f'{_short(error)}; '
        'use the config it was written with.'
      ) from error
  return Checkpoint(restored.params, restored.description)


def describe(folder: str) -> Mapping[str, Any]:
  """The description of a checkpoint alone.

  Raises:
    DamagedError: if it cannot be decoded.
  """
  path = epath.Path(folder).resolve()
  with ocp.Checkpointer(_handler()) as checkpointer:
    try:
      restored = checkpointer.restore(
        path, args=ocp.args.Composite(description=ocp.args.JsonRestore())
      )
    except (KeyError, ValueError, OSError) as error:
      raise DamagedError(
        f'the description of {path} cannot be read: {_short(error)}'
      ) from error
  return restored.description


def remove(folder: str) -> None:
  """Removes a checkpoint, or what is left of one that was not finished.

  Raises:
    OSError: if that cannot be.
  """
  path = epath.Path(folder)
  if path.is_dir():
    path.rmtree()
  else:
    path.unlink()


def _synchronise(path: epath.Path, *, is_deep: bool = True) -> None:
  """Returns when a folder survives a loss of power, with all that is in it.

  Buckets need none of this.
  """
  if '://' in str(path):
    return
  folders = [str(path)]
  if is_deep:
    for parent, below, names in os.walk(path):
      folders += [f'{parent}/{name}' for name in below]
      for name in names:
        _synchronise_one(f'{parent}/{name}', os.O_RDONLY)
  for folder in reversed(folders):
    _synchronise_one(folder, os.O_RDONLY | os.O_DIRECTORY)


def _synchronise_one(path: str, flags: int) -> None:
  file = os.open(path, flags)
  try:
    os.fsync(file)
  finally:
    os.close(file)


@contextlib.contextmanager
def _writing(path: epath.Path) -> Iterator[None]:
  """Says in one sentence why a checkpoint cannot be written.

  Raises:
    OSError: if the disk or the bucket does not take it.
  """
  try:
    yield
  except (OSError, ValueError) as error:
    why = _why_unwritable(error)
    if why is None:
      raise
    # What was written of it takes room, and nobody will ever read it.
    with contextlib.suppress(OSError):
      for unfinished in path.parent.glob(f'{path.name}.newer.orbax-*'):
        unfinished.rmtree()
    raise OSError(
      f'The checkpoint {path} cannot be written ({why}); free some space, '
      'or choose another folder.'
    ) from error


def _why_unwritable(error: OSError | ValueError) -> str | None:
  """The reason in a few words; None if it is not one of the storage."""
  if isinstance(error, OSError):
    return error.strerror or str(error)
  # Tensorstore raises ValueError: a status, a long story, and at its end, if it
  # was the system, the system's number for it.
  if found := re.search(r"os_error_code='(\d+)'", str(error)):
    return os.strerror(int(found[1]))
  if found := re.match(r'([A-Z]+(?:_[A-Z]+)*): ', str(error)):
    return found[1]
  return None


def _short(error: Exception) -> str:
  """An error without the specification that tensorstore adds to each."""
  return str(error).partition(' [tensorstore_spec')[0][:500]


def _check_shapes(stored: Any, wanted: Any) -> None:
  def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
      jax.tree_util.keystr(path, simple=True, separator='.'): leaf.shape
      for path, leaf in leaves
    }

  have, want = shapes(stored), shapes(wanted)
  wrong = [
    f'{name} is {have.get(name, "missing")} instead of '
    f'{want.get(name, "missing")}'
    for name in sorted({*have, *want})
    if have.get(name) != want.get(name)
  ]
  if wrong:
    more = f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''
    raise ValueError('; '.join(wrong[:3]) + more)


def _newer(path: epath.Path) -> epath.Path:
  return path.with_name(path.name + '.newer')


def _older(path: epath.Path) -> epath.Path:
  return path.with_name(path.name + '.older')


def _is_replaceable(path: epath.Path) -> bool:
  if not path.is_dir():
    return False
  names = {entry.name for entry in path.iterdir()}
  return not names or {'params', 'description'} <= names


def _handler() -> ocp.CompositeCheckpointHandler:
  return ocp.CompositeCheckpointHandler(
    params=ocp.StandardCheckpointHandler(),
    description=ocp.JsonCheckpointHandler(),
  )
