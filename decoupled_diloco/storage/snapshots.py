"""Checkpoints of the global model, written by orbax and committed atomically.

A checkpoint is a folder with the parameters (`params`, an orbax PyTree that any
JAX program can restore) and a description (`description`, JSON). Orbax writes
beside it and renames, so a folder of that name is always whole.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath


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
  """
  path = epath.Path(folder).resolve()
  path.parent.mkdir(parents=True, exist_ok=True)
  with ocp.Checkpointer(_handler()) as checkpointer:
    checkpointer.save(
      path,
      args=ocp.args.Composite(
        params=ocp.args.StandardSave(params),
        description=ocp.args.JsonSave(dict(description)),
      ),
      force=True,
    )
  return path


def restore(folder: str, like: Any) -> Checkpoint:
  """Reads a checkpoint.

  Args:
    folder: as given to `save`.
    like: pytree of arrays or `jax.ShapeDtypeStruct`s, with the shardings that
      are wanted.

  Raises:
    ValueError: if there is no checkpoint, or it is of other parameters.
  """
  path = epath.Path(folder).resolve()
  if not path.exists():
    raise ValueError(
      f'there is no checkpoint at {path}; a run writes one when it ends.'
    )
  abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
  with ocp.Checkpointer(_handler()) as checkpointer:
    try:
      restored = checkpointer.restore(
        path,
        args=ocp.args.Composite(
          params=ocp.args.StandardRestore(abstract),
          description=ocp.args.JsonRestore(),
        ),
      )
    except (KeyError, ValueError) as error:
      raise ValueError(
        f'the checkpoint at {path} does not hold these parameters ({error}); '
        'use the config it was written with.'
      ) from error
  return Checkpoint(restored.params, restored.description)


def _handler() -> ocp.CompositeCheckpointHandler:
  return ocp.CompositeCheckpointHandler(
    params=ocp.StandardCheckpointHandler(),
    description=ocp.JsonCheckpointHandler(),
  )
