"""Results of an experiment's runs, kept with what they were asked for.

A result is only good for the question that it answers: where the config has
changed since, it is not taken for the new one.
"""

import dataclasses
import json
import pathlib
from typing import Any

from decoupled_diloco.chaos.result import ChaosResult
from decoupled_diloco.run_folder import write_whole


def save(path: pathlib.Path, asked: Any, result: ChaosResult) -> None:
  """Keeps a result.

  Args:
    path: of the file.
    asked: what the run depends on, of values that JSON has.
    result: of the run.

  Raises:
    OSError: if it cannot be written.
  """
  kept = {'asked': asked, 'result': dataclasses.asdict(result)}
  write_whole(path, json.dumps(kept, indent=2))


def load(path: pathlib.Path, asked: Any) -> ChaosResult | None:
  """The result that was kept; None if there is none.

  Raises:
    ValueError: if it is of another question, or something else is there.
  """
  try:
    kept = json.loads(path.read_text())
    result = ChaosResult(**kept['result'])
  except FileNotFoundError:
    return None
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'{path} is not the result of a run of this version ({error}); remove it '
      'to run that again.'
    ) from error
  changed = list(_changed(kept.get('asked'), json.loads(json.dumps(asked))))
  if changed:
    raise ValueError(
      f'{path} is the result of a run with another {", ".join(changed[:3])}'
      f'{", ..." * (len(changed) > 3)}; choose another config.workdir, or '
      'remove it to run that again.'
    )
  return result


def _changed(old: Any, new: Any, name: str = 'config') -> Any:
  """The dotted names of what differs."""
  if not isinstance(old, dict) or not isinstance(new, dict):
    if old != new:
      yield name
    return
  for key in sorted({*old, *new}):
    yield from _changed(old.get(key), new.get(key), f'{name}.{key}')
