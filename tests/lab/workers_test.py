"""Work side by side, each on its own core."""

import os
import signal

import pytest

from decoupled_diloco.lab import workers


def square(value):
  return value * value


def cores(_):
  return sorted(os.sched_getaffinity(0))


def fail(value):
  raise ValueError(f'cannot do {value}')


def test_all_results_come_with_their_index():
  found = dict(workers.run_all(square, [1, 2, 3], 2))
  assert found == {0: 1, 1: 4, 2: 9}


def test_each_process_has_one_core():
  for _, found in workers.run_all(cores, [0, 1, 2], 0):
    assert len(found) == 1
    assert found[0] in workers.available_cores()


def test_an_error_ends_it():
  with pytest.raises(ValueError, match='cannot do 7'):
    list(workers.run_all(fail, [7, 8], 1))


def test_nothing_outlives_an_interrupt(tmp_path):
  paths = [tmp_path / 'pid', tmp_path / 'other']
  running = workers.run_all(first_then_hang, paths, 2)
  next(running)
  running.close()
  pids = [int(path.read_text()) for path in tmp_path.iterdir()]
  assert len(pids) == 2
  for pid in pids:
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)


def first_then_hang(path):
  """The first ends when the other has begun, which waits for ever."""
  path.write_text(str(os.getpid()))
  if path.name == 'pid':
    while not path.with_name('other').exists():
      os.sched_yield()
    while not path.with_name('other').read_text():
      os.sched_yield()
    return True
  signal.pause()
  return False
