"""An experiment with real processes, through the command that people use."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALL = '--config=tests/chaos/small_chaos.py'
DEADLINE_SECONDS = 200.0


def chaos(*arguments: str) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, '-m', 'decoupled_diloco.chaos', *arguments],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process: subprocess.Popen) -> tuple[str, str]:
  try:
    return process.communicate(timeout=DEADLINE_SECONDS)
  finally:
    process.kill()


def living(workdir: pathlib.Path) -> list[int]:
  """Processes whose command line names this folder."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
    try:
      line = path.read_bytes()
    except OSError:
      continue
    if str(workdir).encode() in line and int(path.parent.name) != os.getpid():
      found.append(int(path.parent.name))
  return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_kind_of_fault_is_survived(tmp_path):
  arguments = (
    SMALL,
    f'--config.workdir={tmp_path}',
    "--config.phases=('decoupled',)",
  )
  output, errors = finish(process := chaos(*arguments))
  assert process.returncode == 0, output + errors
  assert 'Kills a site: learners 0, 1' in errors
  result = json.loads((tmp_path / 'decoupled.json').read_text())
  kinds = ('corrupt', 'freeze', 'partition', 'slow', 'syncer')
  assert {kind: result['faults'][kind] for kind in kinds} == dict.fromkeys(
    kinds, 1
  )
  assert result['faults'].get('kill', 0) + result['faults'].get('site', 0) >= 1
  assert result['crashes'] == result['problems'] == []
  assert result['lives'] == 2
  assert result['refusals'].get('corrupt', 0) <= 1
  assert 0 < result['goodput'] < result['available'] + 0.1 < 1.1
  assert result['detect_seconds'] < result['rejoin_seconds']
  assert '| goodput |' in (tmp_path / 'report.md').read_text()
  assert not living(tmp_path)

  # What is finished is not run again.
  output, errors = finish(process := chaos(*arguments))
  assert process.returncode == 0, output + errors
  assert 'finished before' in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_ends_an_experiment(tmp_path):
  workdir = tmp_path / 'chaos'
  process = chaos(SMALL, f'--config.workdir={workdir}')
  deadline = time.monotonic() + DEADLINE_SECONDS
  tape = workdir / 'decoupled' / 'events.jsonl'
  while not (tape.exists() and '"MergeDone"' in tape.read_text()):
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.1)
  process.send_signal(signal.SIGINT)
  finish(process)
  assert process.returncode == 128 + signal.SIGINT
  assert not living(workdir)
  assert not (workdir / 'decoupled.json').exists()


@pytest.mark.parametrize(
  'argument, part',
  [
    ('--config.faults.weights.kil=1.0', 'kil'),
    ('--config.faults.mean_seconds_between=-1.0', 'must not be negative'),
    ("--config.phases=('x',)", 'must be some of'),
    ('--config.run.budget.rounds=0', 'budget'),
  ],
)
def test_mistakes_end_with_a_sentence(tmp_path, argument, part):
  process = chaos(SMALL, f'--config.workdir={tmp_path}', argument)
  _, errors = finish(process)
  assert process.returncode == 2
  [line] = errors.strip().splitlines()
  assert line.startswith('error: ') and part in line
