"""Every role ends when it is asked to, and leaves what it should."""

import pathlib
import signal
import socket

import pytest

from tests.integration.real_runs import (
  SMALL,
  command,
  endless_run,
  processes_of,
  rounds_merged,
  wait_for,
)

# What a role may take, and what a loaded machine may add.
END_SECONDS = 30.0


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


def role(name: str, workdir: pathlib.Path, port: int, *more: str):
  return command(
    SMALL,
    f'--config.role={name}',
    f'--config.workdir={workdir}',
    f'--config.syncer.address=127.0.0.1:{port}',
    '--config.membership.num_learners=1',
    '--config.budget.rounds=100000',
    *more,
  )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_roles_that_are_asked_to_end(tmp_path):
  port, workdir = free_port(), tmp_path / 'run'
  syncer = role('syncer', workdir, port)
  processes = [syncer]
  try:
    wait_for((workdir / 'address').exists, syncer)
    learner = role('learner', workdir, port)
    processes.append(learner)
    wait_for(lambda: rounds_merged(workdir) > 20, *processes)
    learner.send_signal(signal.SIGTERM)
    _, errors = learner.communicate(timeout=END_SECONDS)
    assert learner.returncode == 128 + signal.SIGTERM, errors
    assert 'Traceback' not in errors
    assert list((workdir / 'learners' / '0' / 'snapshots').iterdir())
    # The syncer goes on, and waits for it.
    assert syncer.poll() is None
    syncer.send_signal(signal.SIGTERM)
    _, errors = syncer.communicate(timeout=END_SECONDS)
    assert syncer.returncode == 128 + signal.SIGTERM, errors
    assert 'Traceback' not in errors
    assert (workdir / 'checkpoint').exists()
    assert not (workdir / 'checkpoint.unfinished').exists()
    # The port is free again at once.
    again = role('syncer', tmp_path / 'other', port)
    processes.append(again)
    wait_for((tmp_path / 'other' / 'address').exists, again)
    again.send_signal(signal.SIGINT)
    _, errors = again.communicate(timeout=END_SECONDS)
    assert again.returncode == 128 + signal.SIGINT, errors
  finally:
    for process in processes:
      process.kill()
      process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_second_signal_ends_everything_at_once(tmp_path):
  workdir = tmp_path / 'run'
  with endless_run(workdir) as process:
    pids = processes_of(workdir, '--launched')
    assert len(pids) == 3
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=END_SECONDS)
  assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
  assert 'Traceback' not in errors
  # In order, what the run has made would have been saved first.
  assert not (workdir / 'checkpoint').exists()
  wait_for(lambda: not processes_of(workdir, '--launched'))
