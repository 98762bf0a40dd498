"""Whole runs of real processes, through the command that people use."""

import json
import signal
import sys

import pytest

from decoupled_diloco.observe.tape import read_tape
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.replaying import replay_tape
from tests.integration.real_runs import (
  DEADLINE_SECONDS,
  SMALL,
  assert_sound,
  command,
  endless_run,
  processes_of,
  wait_for,
)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_survives_a_kill(tmp_path):
  workdir = tmp_path / 'run'
  process = command(
    SMALL,
    f'--config.workdir={workdir}',
    '--config.launch.kill=((1,0.3),)',
    '--config.snapshots.every_seconds=0.5',
  )
  output, errors = process.communicate(timeout=DEADLINE_SECONDS)
  assert process.returncode == 0, errors
  assert 'killing learner 1' in errors
  assert not processes_of(workdir)

  summary = json.loads((workdir / 'summary.json').read_text())
  facts = summary['facts']
  assert facts['held_out_loss_end'] < facts['held_out_loss_start'] - 1
  assert summary['bits_up'] <= 4.25
  assert len(summary['faults']) == 1
  returned = summary['learners'][1]
  assert returned['participation_since_return'] > 0
  for words in ('held-out loss', 'goodput', 'yield', 'bits/parameter'):
    assert words in output
  for name in ('events.jsonl', 'metrics.jsonl', 'checkpoint'):
    assert (workdir / name).exists()

  # The learner that came back read on where it had left, and the learning rate
  # went on from the run's step.
  whole = read_tape(workdir / 'events.jsonl')
  assert_sound(whole)
  steps = whole.steps
  welcomes = [
    effect.message
    for _, effects in steps
    for effect in effects
    if isinstance(effect, fx.Send)
    and isinstance(effect.message, msg.Welcome)
    and effect.learner == 1
  ]
  assert [welcome.total_steps > 0 for welcome in welcomes] == [False, True]
  assert welcomes[1].round > 0
  tape = read_tape(workdir / 'learners' / '1' / 'events.jsonl')
  assert replay_tape(tape) == len(tape.steps)
  resumed = tape.segments[1].steps[0][0]
  assert isinstance(resumed, ev.Resumed)
  assert resumed.state.total_steps > 0
  first_scan = next(
    effect
    for _, effects in tape.segments[1].steps
    for effect in effects
    if isinstance(effect, fx.StartScan)
  )
  K = 24 // 6
  assert first_scan.global_step >= welcomes[1].round * K


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_in_order(tmp_path, number):
  workdir = tmp_path / 'run'
  with endless_run(workdir) as process:
    process.send_signal(number)
    output, errors = process.communicate(timeout=30.0)
  assert process.returncode == 128 + number, errors
  assert 'Traceback' not in errors
  assert 'stopped by' in output
  assert (workdir / 'checkpoint').exists()
  assert not processes_of(workdir)


@pytest.mark.timeout(120)
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_syncer_imports(tmp_path, number):
  workdir = tmp_path / 'run'
  process = command(SMALL, f'--config.workdir={workdir}')
  try:
    wait_for((workdir / 'logs' / 'syncer.log').exists, process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30.0)
  finally:
    process.kill()
  assert process.returncode == 128 + number, errors
  says = f'error: stopped by {number.name} before the run began.'
  assert errors.splitlines()[-1] == says
  assert 'Traceback' not in errors and output == ''
  assert not processes_of(workdir)
  # The folder is fit for another attempt.
  assert not (workdir / 'claimed').exists()
  assert not (workdir / 'events.jsonl').exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_signal_ends_what_is_being_measured(tmp_path):
  """What the run has made is saved; nobody waits for a sample."""
  workdir = tmp_path / 'run'
  process = command(
    SMALL,
    f'--config.workdir={workdir}',
    '--config.budget.rounds=60',
    '--config.inner.warmup_steps=10',
    '--config.evaluation.sample_tokens=1000000',
  )
  try:
    assert process.stderr is not None
    said = iter(process.stderr.readline, '')
    assert any('Sampling 1000000 tokens.' in line for line in said)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30.0)
  finally:
    process.kill()
  assert process.returncode == 128 + signal.SIGTERM, errors
  assert 'Traceback' not in errors
  assert 'complete (60 rounds)' in output and 'held-out loss' in output
  assert (workdir / 'checkpoint').exists()
  assert not processes_of(workdir)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_checkpoint_that_cannot_be_saved(tmp_path):
  workdir = tmp_path / 'run'
  process = command(
    SMALL,
    f'--config.workdir={workdir}',
    '--config.budget.rounds=60',
    '--config.inner.warmup_steps=10',
  )
  try:
    wait_for((workdir / 'events.jsonl').exists, process)
    # Where nobody expects a file.
    (workdir / 'checkpoint').write_text('in the way')
    output, errors = process.communicate(timeout=DEADLINE_SECONDS)
  finally:
    process.kill()
  assert process.returncode == 1, errors
  assert 'Traceback' not in errors
  assert 'not complete (60 rounds' in output and 'goodput' in output
  last = errors.splitlines()[-1]
  assert last.startswith(f'error: {workdir / "checkpoint"} is there already')
  assert json.loads((workdir / 'result.json').read_text())['checkpoint'] == ''
  assert not processes_of(workdir)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_learner_with_another_model_is_turned_away(tmp_path):
  workdir = tmp_path / 'run'
  syncer = command(
    SMALL,
    f'--config.workdir={workdir}',
    '--config.role=syncer',
  )
  try:
    wait_for(lambda: (workdir / 'address').exists(), syncer)
    learner = command(
      SMALL,
      f'--config.workdir={workdir}',
      '--config.role=learner',
      '--config.model.width=48',
      f'--config.syncer.address={(workdir / "address").read_text().strip()}',
    )
    output, errors = learner.communicate(timeout=DEADLINE_SECONDS)
    assert learner.returncode == 2, (output, errors)
    assert 'Traceback' not in errors
    assert 'layout' in errors
    assert 'same config' in errors
  finally:
    syncer.send_signal(signal.SIGTERM)
    syncer.communicate(timeout=60.0)
  assert sys.platform != 'linux' or not processes_of(workdir)
