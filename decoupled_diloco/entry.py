"""What all `python -m` entry points do alike: flags, errors, compiled code.

What a user can get wrong ends with one sentence on standard error and a code,
never with a traceback: while a process sets itself up, every `ValueError` and
`OSError` is of that kind. Once it works, only those errors are that have been
foreseen; anything else is our bug, and keeps its traceback.
"""

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from absl import flags, logging
from ml_collections.config_flags.config_flags import is_config_flag

from decoupled_diloco import config_files
from decoupled_diloco.runtime.launch_options import EXIT_USAGE, LaunchError


def parse_flags(argv: list[str], usage: str) -> None:
  """Parses the command line.

  Raises:
    ValueError: for an unknown flag, config file or field, or a value of the
      wrong type.
    SystemExit: after printing the usage, if that is asked for.
  """
  if {'-h', '--help', '-help'} & set(argv):
    print(usage.strip())
    raise SystemExit(0)
  for name in list(flags.FLAGS):  # A config file may define more.
    if is_config_flag(flags.FLAGS[name]):
      path = _value_of(name, argv)
      path = flags.FLAGS[name].default if path is None else path
      if path is not None:
        config_files.check(str(path), argv, name)
  try:
    rest = flags.FLAGS(argv)
  except flags.IllegalFlagValueError as error:
    raise ValueError(
      f'{error}; give a value of the type that the field has in the config.'
    ) from error
  except (flags.Error, AttributeError, KeyError, TypeError) as error:
    raise ValueError(str(error.args[0] if error.args else error)) from error
  if len(rest) > 1:
    raise ValueError(
      f'{" ".join(rest[1:])!r} is no flag; fields are set with '
      '--config.FIELD=VALUE.'
    )


def _value_of(flag: str, argv: list[str]) -> str | None:
  """What a command line gives as a flag's value, the last time it does."""
  value = None
  for argument, following in zip(argv, [*argv[1:], ''], strict=True):
    name, is_set, given = argument.partition('=')
    if name in (f'--{flag}', f'-{flag}'):
      value = given if is_set else following
  return value


def prepare_jax(role: str = 'learner') -> None:
  """Sets JAX up for a role, before its devices are first used.

  Compiled code is kept between processes and runs, unless the user keeps it
  somewhere already: a learner that is started again is then ready in seconds.
  Only learners compute on accelerators: a syncer, or one who starts others,
  must not take theirs.
  """
  import jax

  # Orbax reports every step of a checkpoint otherwise.
  logging.set_verbosity(logging.WARNING)
  if role != 'learner':
    jax.config.update('jax_platforms', 'cpu')
  if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    folder = pathlib.Path.home() / '.cache' / 'decoupled_diloco' / 'compiled'
    jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def say(text: str) -> None:
  """One line for people who read the log."""
  print(text, flush=True)


def _nobody(line: str) -> None:
  del line


@contextlib.contextmanager
def setting_up(tell: Callable[[str], None] = _nobody) -> Iterator[None]:
  """What goes wrong in here is the user's to mend.

  Args:
    tell: is given the sentence, too.
  """
  try:
    yield
  except (ValueError, OSError) as error:
    leave(error, EXIT_USAGE, tell)


@contextlib.contextmanager
def at_work(tell: Callable[[str], None] = _nobody) -> Iterator[None]:
  """Foreseen failures of a process that works.

  Args:
    tell: is given the sentence, too.
  """
  try:
    yield
  except LaunchError as error:
    leave(error, error.exit_code, tell)
  except (OSError, FloatingPointError) as error:
    leave(error, 1, tell)


def sentence(error: BaseException | str) -> str:
  """An error as one line for people."""
  text = str(error)
  if isinstance(error, OSError) and error.filename:
    text = f'{error.filename}: {error.strerror}'
  return ' '.join(text.split())


def leave(
  error: BaseException | str, code: int, tell: Callable[[str], None] = _nobody
) -> NoReturn:
  """Ends the process with an error as one sentence."""
  line = f'error: {sentence(error)}'
  tell(line)
  # Where the disk is full, a log file cannot take it; the code still says it.
  with contextlib.suppress(OSError):
    sys.stdout.flush()
    print(line, file=sys.stderr, flush=True)
  raise SystemExit(code)


def leave_at_once(code: int) -> NoReturn:
  """Ends the process without waiting for threads that still compute."""
  with contextlib.suppress(OSError):
    sys.stdout.flush()
    sys.stderr.flush()
  os._exit(code)
