"""The config of a run as its processes find it in the run's own folder.

  python -m decoupled_diloco.train --config=.../given.py:FOLDER/run.json

An experiment makes the config of a run in its own process; those that it starts
read it from this file.
"""

import json
import pathlib
from typing import Any

from decoupled_diloco import configuring
from decoupled_diloco.run_folder import write_whole


def get_config(path: str) -> Any:
  """The config that `write` has written."""
  config = configuring.default_config()
  config.update(json.loads(pathlib.Path(path).read_text()))
  return config


def write(config: Any, path: pathlib.Path) -> str:
  """Writes the config of a run; returns the argument that names it.

  Raises:
    OSError: if it cannot be written.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  write_whole(path, json.dumps(config.to_dict(), indent=2))
  return f'--config={pathlib.Path(__file__).resolve()}:{path}'
