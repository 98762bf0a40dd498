"""Trains a model with Decoupled DiLoCo.

  python -m decoupled_diloco.train --config=configs/quickstart.py

runs a syncer and all learners as processes of this machine. On several
machines, one process each:

  python -m decoupled_diloco.train --config=CONFIG --config.role=syncer \\
      --config.syncer.address=HOST:PORT
  python -m decoupled_diloco.train --config=CONFIG --config.role=learner \\
      --config.learner=0 --config.syncer.address=HOST:PORT

Any field of the config can be set with --config.SECTION.FIELD=VALUE; the fields
are those of the options in decoupled_diloco/configuring.py. The exit code is 0
only if the run met its budget and its parameters are finite, and 2 if it could
not begin as it was asked to.
"""

import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from decoupled_diloco import configuring, entry, local_run, roles
from decoupled_diloco.configuring import RunOptions
from decoupled_diloco.runtime.launch import EXIT_USAGE

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Path of a config.')
_LAUNCHED = flags.DEFINE_bool(
  'launched', False, 'Whether a local run has started this process.'
)


def main(argv: list[str]) -> int:
  """Runs the role that the config names; returns the exit code."""
  with entry.setting_up():
    entry.parse_flags(argv, __doc__ or '')
    if _CONFIG.value is None:
      raise ValueError(
        'no config; give one, such as --config=configs/quickstart.py.'
      )
    options = configuring.options_of(_CONFIG.value)
    entry.prepare_jax(options.role)
  match options.role:
    case 'local':
      for learner in range(options.membership.num_learners):
        with entry.setting_up():  # Before any process starts.
          configuring.options_of(_CONFIG.value, learner)
      return local_run.run(options, argv[1:])
    case 'syncer':
      return _serve(options)
    case _:
      return _learn(options)


def _serve(options: RunOptions) -> int:
  with entry.setting_up():
    if not _LAUNCHED.value:
      local_run.claim(options)
    try:
      setup = roles.set_up_syncer(options)
    except BaseException:
      if not _LAUNCHED.value:
        local_run.unclaim(pathlib.Path(options.workdir))
      raise
  with entry.at_work():
    if _LAUNCHED.value:
      # Whoever has launched it reads the result.
      roles.run_syncer(setup)
      return 0
    with local_run.watching(options) as watcher:
      result = roles.run_syncer(setup)
  local_run.show_summary(watcher, result)
  return 0 if result.is_success else 1


def _learn(options: RunOptions) -> int:
  with entry.setting_up():
    setup = roles.set_up_learner(options)
  with entry.at_work():
    finish = roles.run_learner(setup, entry.say)
  if finish.is_failure:
    entry.leave(ValueError(finish.reason), EXIT_USAGE)
  entry.say(finish.reason)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
