"""Processes, and what they report."""

import os
import pathlib
import signal
import sys

import pytest

from decoupled_diloco.runtime import processes
from decoupled_diloco.runtime.processes import REPORT_FD, ReportPipe, spawn


def _run(script: str, log: pathlib.Path, **settings) -> int:
  with spawn([sys.executable, '-ISc', script], log, **settings) as process:
    return process.wait(60.0)


def test_lines_come_whole():
  pipe = ReportPipe()
  assert pipe.lines() == []
  os.write(pipe.writer, b'one\ntw')
  assert pipe.lines() == ['one']
  os.write(pipe.writer, b'o\n\xff\n')
  assert pipe.lines() == ['two', '\ufffd']
  pipe.handed_over()
  assert pipe.lines() == []
  pipe.close()
  pipe.close()
  assert pipe.lines() == []


def test_a_process_finds_its_end_of_the_pipe(tmp_path):
  pipe = ReportPipe()
  # Another descriptor, so that the pipe is not by chance where it should be.
  script = f"import os\nos.write({REPORT_FD}, b'here\\n')\nprint('and here')"
  assert _run(script, tmp_path / 'log', report=pipe) == 0
  assert pipe.lines() == ['here']
  pipe.close()
  assert processes.last_line(tmp_path / 'log') == 'and here'


def test_without_a_pipe_there_is_none(tmp_path):
  script = f'import os\nos.fstat({REPORT_FD})'
  assert _run(script, tmp_path / 'log') == 1
  assert 'Bad file descriptor' in processes.last_line(tmp_path / 'log')


def test_logs_are_appended_to(tmp_path):
  log = tmp_path / 'logs' / 'log'
  for word in ('one', 'two'):
    _run(f'print("{word}")', log)
  assert log.read_text() == 'one\ntwo\n'
  assert processes.last_line(log) == 'two'


@pytest.mark.parametrize(
  ('text', 'last'),
  [('', ''), ('\n\n', ''), ('x\nerror: no port\n', 'no port')],
)
def test_the_last_line_of_a_log(tmp_path, text, last):
  log = tmp_path / 'log'
  log.write_text(text)
  assert processes.last_line(log) == last


def test_ends_in_words():
  assert processes.describe(3) == 'exit code 3'
  assert processes.describe(-signal.SIGKILL) == 'killed by SIGKILL'
