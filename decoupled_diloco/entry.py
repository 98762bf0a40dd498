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
from collections.abc import Iterator

from absl import flags, logging

from decoupled_diloco.runtime.launch import EXIT_USAGE, LaunchError


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
  try:
    rest = flags.FLAGS(argv)
  except (flags.Error, AttributeError, KeyError, TypeError) as error:
    raise ValueError(str(error.args[0] if error.args else error)) from error
  except (SyntaxError, ImportError) as error:
    raise ValueError(f'The config file is no Python: {error}.') from error
  except OSError as error:
    raise ValueError(
      f'The config file cannot be read: {error}. Give the path of one, such as '
      '--config=configs/quickstart.py.'
    ) from error
  if len(rest) > 1:
    raise ValueError(
      f'{" ".join(rest[1:])!r} is no flag; fields are set with '
      '--config.FIELD=VALUE.'
    )


def prepare_jax(role: str = 'learner') -> None:
  """Sets JAX up for a role, before its devices are first used.

  Compiled code is kept between processes and runs, unless the user keeps it
  somewhere already: a learner that is started again is then ready in seconds.
  The syncer computes on the CPU and leaves accelerators to others.
  """
  import jax

  # Orbax reports every step of a checkpoint otherwise.
  logging.set_verbosity(logging.WARNING)
  if role == 'syncer':
    jax.config.update('jax_platforms', 'cpu')
  if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    folder = pathlib.Path.home() / '.cache' / 'decoupled_diloco' / 'compiled'
    jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


def say(text: str) -> None:
  """One line for people who read the log."""
  print(text, flush=True)


@contextlib.contextmanager
def setting_up() -> Iterator[None]:
  """What goes wrong in here is the user's to mend."""
  try:
    yield
  except (ValueError, OSError) as error:
    leave(error, EXIT_USAGE)


@contextlib.contextmanager
def at_work() -> Iterator[None]:
  """Foreseen failures of a process that works."""
  try:
    yield
  except LaunchError as error:
    leave(error, error.exit_code)
  except (OSError, FloatingPointError) as error:
    leave(error, 1)


def leave(error: BaseException, code: int) -> None:
  """Ends the process with an error as one sentence."""
  sys.stdout.flush()
  text = str(error)
  if isinstance(error, OSError) and error.filename:
    text = f'{error.strerror}: {error.filename}'
  print(f'error: {" ".join(text.split())}', file=sys.stderr, flush=True)
  raise SystemExit(code)
