"""What a signal does to a process, tried on small processes of their own."""

import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Each says when it can be signalled, and waits then.
AT_ONCE = """
from decoupled_diloco import stopping
stopping.at_once()
print('ready', flush=True)
try:
  while True:
    time.sleep(60)
except BaseException as error:
  print('swallowed', repr(error), flush=True)
"""
IN_ORDER = """
from decoupled_diloco import stopping
asked = []
stopping.in_order(asked.append)
print('ready', flush=True)
while not asked:
  time.sleep(0.002)
print('asked', *asked, flush=True)
while True:
  time.sleep(60)
"""
WITH_END = IN_ORDER.replace(
  'in_order(asked.append)', 'in_order(asked.append, lambda n: sys.exit(7))'
)


def _start(script: str) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, '-c', f'import sys, time\n{script}'],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def _line(process: subprocess.Popen) -> str:
  assert process.stdout is not None
  return process.stdout.readline().strip()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_before_anything_has_begun_a_signal_is_the_end(number):
  process = _start(AT_ONCE)
  assert _line(process) == 'ready'
  process.send_signal(number)
  output, errors = process.communicate(timeout=60.0)
  assert process.returncode == 128 + number
  # No exception, which somebody could have swallowed.
  assert output == ''
  assert errors == f'error: stopped by {number.name} before the run began.\n'


@pytest.mark.parametrize(
  ('script', 'code', 'last'),
  [(IN_ORDER, 128 + signal.SIGTERM, 'at once.'), (WITH_END, 7, 'at once.')],
)
def test_the_first_signal_asks_and_the_second_ends(script, code, last):
  process = _start(script)
  assert _line(process) == 'ready'
  process.send_signal(signal.SIGINT)
  assert _line(process) == 'asked 2'
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=60.0)
  assert process.returncode == code
  assert errors.startswith('\nStopping in order; once more to stop at once.')
  assert errors.strip().endswith(last)
