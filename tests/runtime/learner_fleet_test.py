"""Learners that die, and what becomes of them; with stand-ins."""

import os

import pytest

from decoupled_diloco.runtime.launch_options import (
  EXIT_USAGE,
  LaunchError,
  LaunchOptions,
)
from tests.runtime.stand_ins import (
  CRASHING,
  LEARNER,
  SYNCER,
)


def test_a_learner_that_may_not_take_part(make):
  script = f"live()\nprint('error: lr=-1 is bad')\nsys.exit({EXIT_USAGE})"
  run = make([LEARNER, script])
  with pytest.raises(LaunchError, match='learner 1: lr=-1 is bad') as caught:
    run.run(lambda: None)
  assert caught.value.exit_code == EXIT_USAGE
  assert len(run.lives(1)) == 1


def test_a_learner_that_crashes_is_restarted_so_often(make):
  options = LaunchOptions(restart_seconds=0.0, max_restarts=2)
  run = make([LEARNER, CRASHING], options=options)
  goes_on = 'the run goes on without it'
  run.until(lambda: any(goes_on in text for text in run.told))
  assert len(run.lives(1)) == 3
  assert len({life[0] for life in run.lives(1)}) == 3
  assert run.log('learner-1') == 'out of luck\n' * 3
  assert len(run.lives(0)) <= 1
  assert run.told == [
    'learner 1 is dead (exit code 1: out of luck)',
    'learner 1 starts again',
  ] * 2 + [
    'learner 1 has died 3 times (exit code 1: out of luck; see '
    f'{run.folder / "logs" / "learner-1.log"}); the run goes on without it'
  ]


def test_a_restart_waits(make):
  options = LaunchOptions(restart_seconds=3600.0)
  run = make([LEARNER, CRASHING], options=options)
  polls = []

  def act():
    if run.told:
      polls.append(run.polls)
    if len(polls) > 20:
      run.touch('done')

  run.run(act)
  assert len(run.lives(1)) == 1
  assert run.told == ['learner 1 is dead (exit code 1: out of luck)']


def test_without_any_learner_left_the_run_ends(make):
  options = LaunchOptions(restart_seconds=0.0, max_restarts=1)
  run = make([CRASHING, CRASHING], options=options)
  with pytest.raises(LaunchError, match='No learner is left'):
    run.run(lambda: None)
  assert [len(run.lives(m)) for m in range(2)] == [2, 2]
  # Whoever has died last has left nobody who could go on.
  assert [text.endswith('goes on without it') for text in run.told][-1] is False


def test_nobody_is_started_again_when_the_run_is_to_end(make):
  # Its stop takes a while, in which a learner dies.
  syncer = SYNCER.replace(
    "write('stopped', '')",
    "write('stopping', ''), until(lambda: has('done'))",
  )
  dying = "live()\nuntil(lambda: has('stopping'))\nsys.exit(1)"
  run = make([LEARNER, dying], syncer=syncer)
  polls = []

  def act():
    if run.lives(0) and run.lives(1) and not run.has('asked'):
      run.touch('asked')
      run.launcher.request_stop()
    if run.has('stopping'):
      polls.append(run.polls)
    if len(polls) > 100:
      run.touch('done')

  run.run(act)
  assert run.told == []
  assert len(run.lives(1)) == 1


def test_the_syncer_may_take_its_time_after_the_learners(make):
  """It saves a checkpoint; a learner lost before is no reason to end."""
  options = LaunchOptions(restart_seconds=0.0, max_restarts=0)
  run = make([LEARNER.replace("'done'", "'ended'"), CRASHING], options=options)
  polls = []

  def act():
    if run.lives(0) and run.told:
      run.touch('ended')
      polls.append(run.polls)
    if len(polls) > 100:
      run.touch('done')

  run.run(act)
  assert len(run.told) == 1


def test_learners_that_have_finished_are_not_started_again(make):
  """The syncer is the one to end the run."""
  run = make(['live()', LEARNER.replace("or has('stopped')", "or has('now')")])
  polls = []

  def act():
    if run.lives(0) and run.lives(1):
      run.touch('now')
      polls.append(run.polls)
    if len(polls) > 50:
      run.touch('done')

  run.run(act)
  assert [len(run.lives(m)) for m in range(2)] == [1, 1]
  assert run.told == []


def test_kills_are_injected_once_and_when_they_are_due(make):
  options = LaunchOptions(
    restart_seconds=0.0, kill=((1, 0.5), (0, 0.25), (1, 0.75))
  )
  run = make([LEARNER, LEARNER], options=options)
  # The share of the run that is done, and the lives that each learner has then
  # had: the next share is only reached when they are seen.
  stages = [(0.2, 1, 1), (0.25, 2, 1), (0.49, 2, 1), (0.6, 2, 2), (0.8, 2, 3)]
  waited = []

  def act():
    run.progress, *lives = stages[0]
    if [len(run.lives(m)) for m in range(2)] != lives:
      return
    waited.append(run.polls)
    if len(waited) < 20:  # If there were more to come, it would.
      return
    waited.clear()
    if len(stages) > 1:
      stages.pop(0)
    else:
      run.touch('done')

  run.run(act)
  dead, again = 'is dead (killed by SIGKILL)', 'starts again'
  assert run.told == [
    'killing learner 0 (SIGKILL) at 25% of the run',
    f'learner 0 {dead}',
    f'learner 0 {again}',
    'killing learner 1 (SIGKILL) at 60% of the run',
    f'learner 1 {dead}',
    f'learner 1 {again}',
    'killing learner 1 (SIGKILL) at 80% of the run',
    f'learner 1 {dead}',
    f'learner 1 {again}',
  ]


@pytest.mark.skipif(
  not hasattr(os, 'sched_getaffinity'), reason='cores cannot be pinned here'
)
@pytest.mark.parametrize('pin', [True, False])
def test_learners_share_the_cores(make, pin):
  cores = sorted(os.sched_getaffinity(0))
  run = make([LEARNER] * 3, options=LaunchOptions(pin_cores=pin))
  run.until(lambda: all(run.lives(m) for m in range(3)))
  for m in range(3):
    expected = [cores[m % len(cores)]] if pin else cores
    assert run.lives(m)[0][3] == str(expected)
  assert sorted(os.sched_getaffinity(0)) == cores


def test_where_cores_cannot_be_pinned(make, monkeypatch):
  """On macOS."""
  for name in ('sched_getaffinity', 'sched_setaffinity'):
    monkeypatch.delattr(os, name, raising=False)
  run = make(
    [LEARNER.replace('live()', 'write(f"lives-{m}", f"{os.getpid()}")')]
  )
  run.until(lambda: run.has('lives-0'))
