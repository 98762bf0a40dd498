"""The command line of `train`: which role this process plays."""

from absl import flags
from ml_collections import config_flags

from decoupled_diloco import (
  configuring,
  entry,
  local_run,
  roles,
  stopping,
  watching,
)
from decoupled_diloco.run_folder import RunFolder
from decoupled_diloco.run_options import RunOptions
from decoupled_diloco.runtime.launch_options import EXIT_USAGE


def run(argv: list[str], usage: str) -> int:
  """Plays the role that the config names; returns the exit code.

  Args:
    argv: the command line.
    usage: what is printed for --help.

  Raises:
    SystemExit: if the run could not begin or go on, with a sentence.
  """
  # Not where it is imported: another program has a --config of its own.
  config = config_flags.DEFINE_config_file('config', None, 'Path of a config.')
  is_launched = flags.DEFINE_bool(
    'launched', False, 'Whether a local run has started this process.'
  )
  with entry.setting_up():
    entry.parse_flags(argv, usage)
    if config.value is None:
      raise ValueError(
        'no config; give one, such as --config=configs/quickstart.py.'
      )
    options = configuring.options_of(config.value)
    entry.prepare_jax(options.role)
  match options.role:
    case 'local':
      with entry.setting_up():
        learners = [
          configuring.options_of(config.value, learner)
          for learner in range(options.membership.num_learners)
        ]
        roles.check(options, learners)
      return local_run.run(options, argv[1:])
    case 'syncer' if is_launched.value:
      return _serve_launcher(options)
    case 'syncer':
      return _serve(options)
    case _:
      return _learn(options)


def _serve_launcher(options: RunOptions) -> int:
  with local_run.reporting() as reporter:
    with entry.setting_up(reporter.error):
      setup = roles.set_up_syncer(options, reporter.tell)
    with entry.at_work(reporter.error):
      result = roles.run_syncer(setup, reporter.tell)
    reporter.result(result)
  # Whoever has launched it reads the result, and waits for the process: letting
  # jax take itself apart would take a second, and nothing is left to close.
  entry.leave_at_once(0)


def _serve(options: RunOptions) -> int:
  folder = RunFolder(options.workdir)
  with entry.setting_up():
    folder.claim(resume=options.resume)
    try:
      setup = roles.set_up_syncer(options, entry.say)
    except BaseException:
      folder.unclaim()
      raise
  with entry.at_work(), watching.watching(folder) as watcher:
    result = roles.run_syncer(setup, watcher.tell)
  watching.show_summary(watcher, result)
  if result.failure:
    entry.leave(result.failure, result.exit_code)
  if result.stopped_by:
    entry.leave_at_once(result.exit_code)
  return result.exit_code


def _learn(options: RunOptions) -> int:
  with entry.setting_up():
    folder = RunFolder(options.workdir)
    folder.make(folder.learner_tape(options.learner).parent)
    setup = roles.set_up_learner(options)
  with entry.at_work():
    finish, stopped_by = roles.run_learner(setup, entry.say)
  if finish.is_failure:
    entry.leave(finish.reason, EXIT_USAGE)
  entry.say(finish.reason)
  return stopping.exit_code(stopped_by) if stopped_by else 0
