"""An experiment with real processes, through the command that people use."""

import json
import signal
import subprocess

import pytest

from tests.integration.real_runs import (
  command,
  finish,
  processes_of,
  rounds_merged,
  wait_for,
)

SMALL = '--config=tests/chaos/small_chaos.py'


def chaos(*arguments: str) -> subprocess.Popen:
  return command(*arguments, module='chaos')


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
  result = json.loads((tmp_path / 'decoupled.json').read_text())['result']
  kinds = ('corrupt', 'freeze', 'partition', 'slow', 'syncer')
  assert {kind: result['faults'][kind] for kind in kinds} == dict.fromkeys(
    kinds, 1
  )
  assert result['faults'].get('kill', 0) + result['faults'].get('site', 0) >= 1
  assert result['crashes'] == result['problems'] == []
  assert result['lives'] == 2
  assert 0 < result['goodput'] < result['available'] + 0.1 < 1.1
  assert result['detect_seconds'] < result['rejoin_seconds']
  assert '| goodput |' in (tmp_path / 'report.md').read_text()
  assert not processes_of(tmp_path)

  # What is finished is not run again.
  output, errors = finish(process := chaos(*arguments))
  assert process.returncode == 0, output + errors
  assert 'finished before' in output

  # It is not the result of another experiment.
  _, errors = finish(
    process := chaos(*arguments, '--config.slow_bytes_per_second=1000.0')
  )
  assert process.returncode == 2
  assert 'a run with another config.slow_bytes_per_second;' in errors


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_ends_an_experiment(tmp_path):
  workdir = tmp_path / 'chaos'
  process = chaos(SMALL, f'--config.workdir={workdir}')
  wait_for(lambda: rounds_merged(workdir / 'decoupled') > 0, process)
  process.send_signal(signal.SIGINT)
  finish(process)
  assert process.returncode == 128 + signal.SIGINT
  assert not processes_of(workdir)
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
