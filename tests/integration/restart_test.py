"""Real syncers, killed and started again: nothing that was merged is lost."""

import json
import signal

import pytest

from decoupled_diloco.observe.tape import read_tape
from decoupled_diloco.protocol import events as ev
from tests.integration.real_runs import (
  SMALL,
  assert_sound,
  command,
  finish,
  rounds_merged,
  wait_for,
)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_survives_its_syncer(tmp_path):
  workdir = tmp_path / 'run'
  process = command(
    SMALL,
    f'--config.workdir={workdir}',
    "--config.launch.kill=(('syncer',0.2),('syncer',0.5),('syncer',0.7))",
  )
  output, errors = finish(process)
  assert process.returncode == 0, errors
  assert errors.count('killing the syncer') == 3
  assert 'complete (700 rounds)' in output
  tape = read_tape(workdir / 'events.jsonl')
  assert len(tape.segments) == 4
  assert_sound(tape)
  summary = json.loads((workdir / 'summary.json').read_text())
  assert summary['facts']['held_out_loss_end'] < 2.5
  # The learners have gone on: none was started again.
  for learner in range(2):
    path = workdir / 'learners' / str(learner) / 'events.jsonl'
    assert len(read_tape(path).segments) == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_stopped_is_continued(tmp_path, number):
  """Everything was: launcher, syncer and learners."""
  workdir = tmp_path / 'run'
  arguments = (SMALL, f'--config.workdir={workdir}')
  process = command(*arguments)
  wait_for(lambda: rounds_merged(workdir) >= 100, process)
  process.send_signal(number)
  finish(process)
  before = rounds_merged(workdir)

  again = command(*arguments)
  _, errors = finish(again)
  assert again.returncode == 2
  assert '--config.resume=True' in errors.splitlines()[-1]

  process = command(*arguments, '--config.resume=True')
  output, errors = finish(process)
  assert process.returncode == 0, errors
  assert 'Continues run' in errors
  assert 'complete (700 rounds)' in output
  tape = read_tape(workdir / 'events.jsonl')
  assert len(tape.segments) == 2
  assert_sound(tape)
  first = tape.segments[1].steps[0][0]
  assert isinstance(first, ev.Restarted)
  assert first.state is not None
  assert (
    before - 2 <= first.state.rounds_merged + len(first.merged) <= before + 2
  )
