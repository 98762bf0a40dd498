"""A whole run on one machine: its processes, and what they tell each other."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from decoupled_diloco import entry, stopping
from decoupled_diloco.run_folder import RunFolder
from decoupled_diloco.run_options import RunOptions
from decoupled_diloco.run_result import Result
from decoupled_diloco.runtime.launch import Launcher
from decoupled_diloco.runtime.launch_options import LaunchError
from decoupled_diloco.runtime.processes import REPORT_FD
from decoupled_diloco.watching import Watcher, show_summary


class Reporter:
  """How a syncer that was launched tells its launcher what it does."""

  def __init__(self, stream: Any):
    self._stream = stream

  def tell(self, text: str) -> None:
    """Something that people should read."""
    self._write(json.dumps({'tell': text}))

  def result(self, result: Result) -> None:
    """How the run ended."""
    self._write(json.dumps({'result': dataclasses.asdict(result)}))

  def error(self, line: str) -> None:
    """Why there is no result: a line that begins with 'error: '."""
    self._write(line)

  def _write(self, line: str) -> None:
    self._stream.write(line + '\n')
    self._stream.flush()


@contextlib.contextmanager
def reporting() -> Iterator[Reporter]:
  """What a launched process reports with.

  Raises:
    OSError: if it was not launched.
  """
  with os.fdopen(REPORT_FD, 'w') as stream:
    yield Reporter(stream)


class LocalRun:
  """A run whose processes are all on this machine.

  Args:
    options: of the run.
    command: as of `Launcher`.

  Attributes:
    watcher: of the run.
    launcher: of its processes.
    result: how it ended; None before the syncer has said it.
    failure: why it could not go on; None if it could.

  Raises:
    ValueError: if the folder is not for this run.
  """

  def __init__(
    self,
    options: RunOptions,
    command: Callable[[str, int, str, bool], Sequence[str]],
  ):
    self.folder = RunFolder(options.workdir)
    self.folder.claim(resume=options.resume)
    self.watcher = Watcher(self.folder)
    self.result: Result | None = None
    self.failure: LaunchError | OSError | None = None
    self.launcher = Launcher(
      options.launch,
      command=command,
      num_learners=options.membership.num_learners,
      workdir=self.folder.root,
      progress=lambda: self.watcher.progress,
      tell=self.watcher.tell,
      hear=self._hear,
    )

  def run(
    self,
    on_poll: Callable[[], None] = lambda: None,
    poll_seconds: float = 0.1,
  ) -> None:
    """Launches syncer and learners, and watches them until they have ended.

    Args:
      on_poll: called all the time from this thread.
      poll_seconds: how often.
    """

    def poll() -> None:
      self.watcher.poll()
      on_poll()

    self.watcher.tell(
      f'Setting up the syncer; what processes print goes to {self.folder.logs}.'
    )
    try:
      self.launcher.run(poll, poll_seconds)
    except (LaunchError, OSError) as error:
      self.failure = error
    finally:
      self.watcher.close()
      self.folder.unclaim()

  def end_at_once(self, number: int) -> None:
    """Ends this process and all of the run, when signal `number` says so."""
    self.launcher.kill_all()
    # Not os._exit: the terminal has to be put in order.
    raise SystemExit(stopping.exit_code(number))

  def _hear(self, line: str) -> None:
    report = json.loads(line)
    if 'tell' in report:
      self.watcher.tell(report['tell'])
    else:
      self.result = Result(**report['result'])


def run(options: RunOptions, arguments: Sequence[str]) -> int:
  """Launches syncer and learners, watches them, shows what came out.

  Args:
    options: of the run.
    arguments: of this command, without the program's name; its processes get
      the same and their role.

  Returns:
    The exit code.

  Raises:
    SystemExit: if the run could not begin or go on, with a sentence.
  """
  folder = RunFolder(options.workdir)
  with entry.setting_up():
    local = LocalRun(
      options,
      lambda role, learner, address, is_again: command(
        arguments, folder, role, learner, address, is_again=is_again
      ),
    )
  stopping.in_order(local.launcher.request_stop, local.end_at_once)
  local.run()
  if local.failure is None or local.watcher.has_begun:
    show_summary(local.watcher, local.result)
  with entry.at_work():
    if local.failure is not None:
      raise local.failure
  assert local.result is not None  # The syncer has ended with 0.
  if local.result.failure:
    entry.leave(local.result.failure, local.result.exit_code)
  return local.result.exit_code


def command(
  arguments: Sequence[str],
  folder: RunFolder,
  role: str,
  learner: int,
  address: str,
  *,
  is_again: bool = False,
) -> list[str]:
  """The command line of a process of a run.

  Args:
    arguments: of the launcher's own.
    folder: of the run.
    role: 'syncer' or 'learner'.
    learner: its number; the syncer has none.
    address: of the syncer; '' for its own first process.
    is_again: whether it goes on for a process that has died.
  """
  changes = {'role': role, 'workdir': str(folder.root)}
  if role == 'learner':
    changes['learner'] = str(learner)
  if address:
    changes['syncer.address'] = address
  if is_again:
    changes['resume'] = 'True'
  return [
    sys.executable,
    '-m',
    'decoupled_diloco.train',
    *arguments,
    *(f'--config.{name}={value}' for name, value in changes.items()),
    '--launched',
  ]
