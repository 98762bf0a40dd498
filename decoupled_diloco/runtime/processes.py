"""Processes that end with whoever has started them, and may report to it."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

# The file descriptor on which a process finds its end of a `ReportPipe`.
REPORT_FD = 3

# Becomes the process that is wanted, after it has made sure that it ends with
# its parent, and has pinned itself to a core before jax counts them. This could
# be a preexec_fn if forking were safe in a process with threads, such as jax's.
_BOOTSTRAP = """
import os, sys
parent, core, report, report_fd, *command = sys.argv[1:]
if sys.platform == 'linux':
  import ctypes, signal
  PR_SET_PDEATHSIG = 1
  ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
  if os.getppid() != int(parent):
    sys.exit('the launcher has ended')
if core:
  os.sched_setaffinity(0, {int(core)})
if report:
  os.dup2(int(report), int(report_fd))
os.execvp(command[0], command)
"""


class ReportPipe:
  """Lines from a process that it has started, read without ever waiting.

  Unlike a file, a pipe works where the disk is full.
  """

  def __init__(self):
    self._reader, self.writer = os.pipe()
    os.set_blocking(self._reader, False)
    self._unfinished = b''
    self._is_writer_open = self._is_open = True

  def handed_over(self) -> None:
    """The process has its end; ours is closed, so that its death is noticed."""
    if self._is_writer_open:
      os.close(self.writer)
      self._is_writer_open = False

  def lines(self) -> list[str]:
    """The lines that have come since the last call."""
    data = self._unfinished
    with contextlib.suppress(BlockingIOError):
      while self._is_open and (more := os.read(self._reader, 1 << 16)):
        data += more
    *lines, self._unfinished = data.split(b'\n')
    return [line.decode(errors='replace') for line in lines]

  def close(self) -> None:
    """Closes both ends; a second time does nothing."""
    self.handed_over()
    if self._is_open:
      os.close(self._reader)
      self._is_open = False


def spawn(
  command: Sequence[str],
  log: pathlib.Path,
  *,
  core: int | None = None,
  report: ReportPipe | None = None,
) -> subprocess.Popen:
  """Starts a process in a session of its own.

  A Ctrl-C in the terminal is then for its parent alone, which can end it in
  order.

  Args:
    command: program and arguments.
    log: what it prints is appended there.
    core: where it runs; None for anywhere.
    report: where it can report, as file descriptor `REPORT_FD`.

  Raises:
    OSError: if the log cannot be written.
  """
  log.parent.mkdir(parents=True, exist_ok=True)
  bootstrap = [
    *(sys.executable, '-ISc', _BOOTSTRAP, str(os.getpid())),
    '' if core is None else str(core),
    '' if report is None else str(report.writer),
    str(REPORT_FD),
  ]
  with log.open('ab') as output:
    process = subprocess.Popen(
      [*bootstrap, *command],
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
      pass_fds=() if report is None else (report.writer,),
    )
  if report is not None:
    report.handed_over()
  return process


def core_of(number: int) -> int | None:
  """A core for the process of this number, in turn; None on macOS."""
  if not hasattr(os, 'sched_getaffinity'):
    return None
  cores = sorted(os.sched_getaffinity(0))
  return cores[number % len(cores)]


def send(process: subprocess.Popen, number: int) -> None:
  """Sends a signal to a process, if it is still there."""
  if process.poll() is None:
    with contextlib.suppress(ProcessLookupError):
      process.send_signal(number)


def describe(code: int) -> str:
  """How a process has ended, given its exit code."""
  if code < 0:
    return f'killed by {signal.Signals(-code).name}'
  return f'exit code {code}'


def last_line(log: pathlib.Path) -> str:
  """What a process said last, such as why it has ended; '' for nothing."""
  lines = log.read_text(errors='replace').strip().splitlines()
  return lines[-1].removeprefix('error: ') if lines else ''
