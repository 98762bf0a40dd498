"""The checkpoints of the synchronous baseline: one file, the newest one.

The state is the same on all processes, so one of them writes it. A file of
arrays is the fastest way there is for so small a state; that is to the
baseline's advantage.
"""

import os
import pathlib
import re
from typing import Any

import jax
import numpy as np

_NAME = re.compile(r'step-(\d+)\.npz')


def save(folder: pathlib.Path, step: int, state: Any) -> None:
  """Writes a checkpoint, and removes older ones when it is durable.

  Args:
    folder: of the checkpoints.
    step: that the state has been trained to.
    state: pytree of numpy arrays.

  Raises:
    OSError: if it cannot be written.
  """
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f'step-{step}.npz'
  temporary = path.with_suffix('.unfinished')
  leaves = jax.tree.leaves(state)
  with temporary.open('wb') as file:
    np.savez(file, *leaves)
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)
  for other in steps(folder):
    if other < step:
      (folder / f'step-{other}.npz').unlink(missing_ok=True)


def steps(folder: pathlib.Path) -> list[int]:
  """The steps of the checkpoints that are there, in order."""
  if not folder.exists():
    return []
  found = [_NAME.fullmatch(path.name) for path in folder.iterdir()]
  return sorted(int(match[1]) for match in found if match)


def restore(folder: pathlib.Path, like: Any) -> tuple[int, Any] | None:
  """The newest checkpoint, and its step; None if there is none.

  Args:
    folder: of the checkpoints.
    like: pytree of the state's structure.
  """
  found = steps(folder)
  if not found:
    return None
  with np.load(folder / f'step-{found[-1]}.npz') as arrays:
    leaves = [arrays[name] for name in arrays.files]
  return found[-1], jax.tree.unflatten(jax.tree.structure(like), leaves)
