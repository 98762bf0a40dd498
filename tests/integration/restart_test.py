"""Real syncers, killed and started again: nothing that was merged is lost."""

import collections
import json
import pathlib
import signal
import subprocess
import time

import pytest

from decoupled_diloco.observe.tape import Tape, read_tape
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.replaying import machine_of, replay_tape
from tests.integration.command_test import command

DEADLINE_SECONDS = 150.0
SMALL = '--config=tests/integration/small_config.py'


def finish(process: subprocess.Popen) -> tuple[str, str]:
  try:
    return process.communicate(timeout=DEADLINE_SECONDS)
  finally:
    process.kill()


def check_tape(tape: Tape) -> None:
  """It replays, and versions only ever go up by one.

  What was published in one life of the syncer is there in the next.
  """
  assert replay_tape(tape) == len(tape.steps)
  published = collections.Counter()  # By fragment: the newest version.
  for number, segment in enumerate(tape.segments):
    if number:
      event = segment.steps[0][0]
      assert isinstance(event, ev.Restarted)
      machine = machine_of(segment.header)
      state, _ = machine.step(machine.init(), event)
      for fragment, version in published.items():
        # The last merge may be durable and not published.
        assert state.versions[fragment] - version in (0, 1)
      published.update(
        {
          fragment: version - published[fragment]
          for fragment, version in enumerate(state.versions)
        }
      )
    for _, effects in segment.steps:
      for effect in effects:
        if isinstance(effect, fx.Publish):
          published[effect.fragment] += 1
          assert effect.version == published[effect.fragment]


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
  check_tape(tape)
  summary = json.loads((workdir / 'summary.json').read_text())
  assert summary['facts']['held_out_loss_end'] < 2.5
  # The learners have gone on: none was started again.
  for learner in range(2):
    path = workdir / 'learners' / str(learner) / 'events.jsonl'
    assert len(read_tape(path).segments) == 1


def merged(workdir: pathlib.Path) -> int:
  """How many merges the tape has."""
  try:
    return (workdir / 'events.jsonl').read_text().count('"MergeDone"')
  except FileNotFoundError:
    return 0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_stopped_is_continued(tmp_path, number):
  """Everything was: launcher, syncer and learners."""
  workdir = tmp_path / 'run'
  arguments = (SMALL, f'--config.workdir={workdir}')
  process = command(*arguments)
  deadline = time.monotonic() + DEADLINE_SECONDS
  while merged(workdir) < 100:
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.1)
  process.send_signal(number)
  finish(process)
  before = merged(workdir)

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
  check_tape(tape)
  first = tape.segments[1].steps[0][0]
  assert isinstance(first, ev.Restarted)
  assert first.state is not None
  assert (
    before - 2 <= first.state.rounds_merged + len(first.merged) <= before + 2
  )
