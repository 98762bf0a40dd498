"""The entry point: nothing heavy is loaded before a signal can be answered."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.real_runs import command

ROOT = pathlib.Path(__file__).parents[1]


def test_nothing_heavy_comes_before_the_handlers():
  script = (
    'import sys\n'
    'from decoupled_diloco import stopping, train\n'
    "heavy = {'jax', 'absl', 'ml_collections', 'numpy', 'orbax', 'grpc'}\n"
    'print(sorted(heavy & set(sys.modules)))'
  )
  output = subprocess.run(
    [sys.executable, '-c', script],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
    timeout=60.0,
  )
  assert output.stdout == '[]\n'


# From then on Python has started; this is when the first imports of others'
# code are seen, and when jax's are.
@pytest.mark.skipif(sys.platform != 'linux', reason='/proc tells')
@pytest.mark.timeout(120)
@pytest.mark.parametrize('library', ['_ctypes', 'jaxlib'])
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_imports(library, number, tmp_path):
  process = command(
    '--config=tests/integration/small_config.py',
    f'--config.workdir={tmp_path}/run',
  )
  maps = pathlib.Path(f'/proc/{process.pid}/maps')
  deadline = time.monotonic() + 60.0
  while library not in maps.read_text():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.001)
  process.send_signal(number)
  output, errors = process.communicate(timeout=60.0)
  assert process.returncode == 128 + number, errors
  assert output == ''
  assert errors == f'error: stopped by {number.name} before the run began.\n'
  assert not (tmp_path / 'run').exists()
