"""The command line of the quality lab."""

import time

from ml_collections import config_flags

from decoupled_diloco import entry
from decoupled_diloco.lab import running

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'Config file of the study.'
)


def run(argv: list[str], usage: str) -> int:
  """Carries a study out; returns the exit code.

  Args:
    argv: the command line.
    usage: what is printed for --help.

  Raises:
    SystemExit: if the study is not right, with a sentence.
  """
  with entry.setting_up():
    entry.parse_flags(argv, usage)
    if _CONFIG.value is None:
      raise ValueError(
        'no config; give that of a study, such as '
        '--config=configs/lab/parity.py.'
      )
    study = running.Study(_CONFIG.value)
  began = time.monotonic()
  with entry.at_work():
    study.run()
  entry.say(study.table())
  entry.say(
    f'{study.num_cells} runs, {time.monotonic() - began:.0f} s; results, table '
    f'and plot are in {study.workdir}.'
  )
  return 0
