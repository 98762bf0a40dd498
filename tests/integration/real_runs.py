"""Runs of real processes, started as a user would, watched and ended."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from decoupled_diloco.auditing import audit
from decoupled_diloco.observe.tape import Tape
from tests.protocol.accounts import Accounts

ROOT = pathlib.Path(__file__).parents[2]
SMALL = '--config=tests/integration/small_config.py'
# Of anything that is waited for; never what a test is about.
DEADLINE_SECONDS = 200.0


def command(
  *arguments: str, module: str = 'train', **settings
) -> subprocess.Popen:
  """Starts `python -m decoupled_diloco.train`, or another module of it."""
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
  return subprocess.Popen(
    [sys.executable, '-m', f'decoupled_diloco.{module}', *arguments],
    cwd=ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **settings,
  )


@contextlib.contextmanager
def endless_run(workdir: pathlib.Path) -> Iterator[subprocess.Popen]:
  """A run that has merged some rounds, and does not end by itself."""
  process = command(
    SMALL, f'--config.workdir={workdir}', '--config.budget.rounds=100000'
  )
  try:
    wait_for(lambda: rounds_merged(workdir) > 20, process)
    yield process
  finally:
    process.kill()


def wait_for(
  condition: Callable[[], object], *processes: subprocess.Popen
) -> None:
  """Waits until it is met; these processes have to live until then."""
  deadline = time.monotonic() + DEADLINE_SECONDS
  while not condition():
    for process in processes:
      assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.05)


def finish(
  process: subprocess.Popen, seconds: float = DEADLINE_SECONDS
) -> tuple[str, str]:
  """What a process that ends by itself has said, and its errors."""
  try:
    return process.communicate(timeout=seconds)
  finally:
    process.kill()


def rounds_merged(workdir: pathlib.Path) -> int:
  """How many merges the tape of a run has."""
  try:
    return (workdir / 'events.jsonl').read_text().count('"MergeDone"')
  except FileNotFoundError:
    return 0


def processes_of(workdir: pathlib.Path, flag: str = '') -> list[int]:
  """Living processes whose command line names a run's folder, and this flag."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
    try:
      line = path.read_bytes()
    except OSError:
      continue
    is_named = str(workdir).encode() in line and flag.encode() in line
    if is_named and int(path.parent.name) != os.getpid():
      found.append(int(path.parent.name))
  return found


def assert_sound(tape: Tape) -> None:
  """What must be true of every tape of a syncer that has ended in order."""
  assert audit(tape).problems == ()
  accounts = Accounts()
  accounts.tape = [(event, tuple(effects)) for event, effects in tape.steps]
  accounts.assert_no_token_is_merged_twice()
