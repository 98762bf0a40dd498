"""The launcher, with stand-ins for its processes."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from decoupled_diloco.runtime.launch_options import (
  EXIT_USAGE,
  LaunchError,
  LaunchOptions,
)
from tests.runtime.stand_ins import (
  DEADLINE_SECONDS,
  LEARNER,
  PRELUDE,
  STUBBORN,
  SYNCER,
  Run,
)


def test_learners_start_when_the_syncer_listens(make):
  run = make([LEARNER, LEARNER])
  (run.folder / 'address').write_text('of an older run')
  run.until(lambda: all(len(run.lives(m)) == 1 for m in range(2)))
  for m in range(2):
    ((pid, session, address, _),) = run.lives(m)
    assert address == 'host:1'
    assert session == pid  # A Ctrl-C in the terminal does not reach it.
    assert run.log(f'learner-{m}') == f'I am learner {m}\n'
  assert run.log('syncer') == ''
  assert run.announced == ['Starting 2 learners.']
  assert run.told == []


@pytest.mark.parametrize(
  ('script', 'message', 'exit_code'),
  [
    ("print('x')\nprint('error: disk full')\nsys.exit(1)", 'disk full', 1),
    ("raise RuntimeError('a bug')", 'exit code 1.*RuntimeError: a bug', 1),
    (
      f"print('error: no port')\nsys.exit({EXIT_USAGE})",
      '^no port$',
      EXIT_USAGE,
    ),
    ('os.kill(os.getpid(), signal.SIGKILL)', r'SIGKILL.*see .*syncer\.log', 1),
    ('sys.exit(0)', 'left before it listened', 1),
  ],
)
def test_a_syncer_that_dies_at_once(make, script, message, exit_code):
  run = make([LEARNER], syncer=script)
  with pytest.raises(LaunchError, match=message) as caught:
    run.run(lambda: None)
  assert caught.value.exit_code == exit_code
  assert run.lives(0) == []


def test_a_syncer_that_dies_later(make):
  script = SYNCER.replace(
    "until(lambda: has('done'))", 'until(lambda: has("x"))'
  )
  run = make([LEARNER], syncer=script + "print('torn')\nsys.exit(3)")
  with pytest.raises(LaunchError, match=r'exit code 3\): torn'):
    run.run(lambda: run.touch('x') if run.lives(0) else None)


# Dies as often as the folder has files named die-N, and lives on after that.
MORTAL = """
live()
write('address', address or 'host:1')
until(lambda: has('done') or has(f'die-{len(lives())}'))
if not has('done'):
  os.kill(os.getpid(), signal.SIGKILL)
"""
MORTAL_PRELUDE = """
def lives():
  return (folder / f'lives-{m}').read_text().splitlines()
"""


def test_a_syncer_that_is_killed_goes_on_where_it_was(make):
  run = make([LEARNER], syncer=MORTAL_PRELUDE + MORTAL)

  def act():
    if run.lives(0) and not run.has('die-2'):
      run.touch('die-1')
      run.touch('die-2')
    if len(run.lives(-1)) == 3:
      run.touch('done')

  run.run(act)
  # The address of the second and the third life is that of the first; the
  # learner lives on.
  assert [life[2] for life in run.lives(-1)[1:]] == ['host:1', 'host:1']
  assert len(run.lives(0)) == 1
  assert (
    run.told == ['the syncer is dead (killed by SIGKILL); it starts again'] * 2
  )


def test_a_syncer_is_not_started_for_ever(make):
  options = LaunchOptions(max_restarts=1, stop_seconds=30.0)
  run = make([LEARNER], syncer=MORTAL_PRELUDE + MORTAL, options=options)
  for life in range(1, 4):
    run.touch(f'die-{life}')
  with pytest.raises(LaunchError, match=r'has ended .killed by SIGKILL'):
    run.run(lambda: None)
  assert len(run.lives(-1)) == 2


def test_a_syncer_can_be_killed_at_a_share_of_the_run(make):
  options = LaunchOptions(kill=(('syncer', 0.5),), stop_seconds=30.0)
  run = make([LEARNER], syncer=MORTAL_PRELUDE + MORTAL, options=options)

  def act():
    run.progress = 0.6 if run.lives(0) else 0.0
    if len(run.lives(-1)) == 2:
      run.touch('done')

  run.run(act)
  assert run.told[0] == 'killing the syncer (SIGKILL) at 60% of the run'


def test_a_syncer_that_never_listens(make):
  syncer = "write('syncer-pid', str(os.getpid()))\nuntil(lambda: False)"
  options = LaunchOptions(start_seconds=0.05)
  run = make([LEARNER], syncer=syncer, options=options)
  with pytest.raises(LaunchError, match=r'start_seconds=0\.05; see .*syncer'):
    run.run(lambda: None)


def test_a_stop_is_the_syncers_to_carry_out(make):
  run = make([LEARNER, LEARNER])
  asked = []

  def act():
    if run.lives(0) and run.lives(1) and not asked:
      asked.append(True)
      run.launcher.request_stop()

  run.run(act)
  assert run.has('stopped')
  assert run.told == []
  run.launcher.request_stop()  # Too late, and no error.


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_the_syncer_sets_itself_up(make, number):
  """It has no handler yet, and must not end with a traceback."""
  syncer = "write('syncer-pid', str(os.getpid()))\nuntil(lambda: False)"
  run = make([LEARNER], syncer=syncer)

  def act():
    if run.has('syncer-pid') and not run.has('asked'):
      run.touch('asked')
      run.launcher.request_stop(number)

  with pytest.raises(LaunchError, match='before the run began') as caught:
    run.run(act)
  assert str(caught.value).startswith(f'stopped by {number.name}')
  assert caught.value.exit_code == 128 + number
  assert run.lives(0) == []


def test_a_stop_before_anything_is_started(make):
  run = make([LEARNER])
  run.launcher.request_stop(signal.SIGINT)
  with pytest.raises(LaunchError, match='before the run began'):
    run.run(lambda: None)
  assert not run.has('logs')


def test_a_syncer_that_does_not_heed_a_stop_is_killed(make):
  syncer = SYNCER.replace('sys.exit(0)', 'pass')
  run = make([LEARNER], syncer=syncer, options=LaunchOptions(stop_seconds=0.2))

  def act():
    if run.lives(0) and not run.has('asked'):
      run.touch('asked')
      run.launcher.request_stop(signal.SIGTERM)

  with pytest.raises(LaunchError, match=r'within stop_seconds=0\.2') as caught:
    run.run(act)
  assert caught.value.exit_code == 128 + signal.SIGTERM


def test_what_the_syncer_reports_is_heard(make):
  syncer = SYNCER.replace(
    "until(lambda: has('done'))",
    """os.write(3, b'saving ')
until(lambda: has('done'))
os.write(3, b'it\\nall is well\\n')""",
  )
  run = make([LEARNER], syncer=syncer)
  run.until(lambda: bool(run.lives(0)))
  assert run.heard == ['saving it', 'all is well']


def test_a_reported_error_is_why_the_run_ends(make):
  """Where the disk is full, the log may not have it."""
  syncer = (
    "os.write(3, b'fine so far\\nerror: disk full\\n')\n"
    "print('something else')\nsys.exit(1)"
  )
  run = make([LEARNER], syncer=syncer)
  with pytest.raises(LaunchError, match=r'^disk full$') as caught:
    run.run(lambda: None)
  assert caught.value.exit_code == 1
  assert run.heard == ['fine so far']


def test_a_learner_that_does_not_leave_is_killed(make):
  run = make([STUBBORN, LEARNER], options=LaunchOptions(stop_seconds=0.2))
  run.until(lambda: bool(run.lives(0) and run.lives(1)))
  assert len(run.lives(0)) == 1


def test_a_syncer_that_does_not_leave_is_killed(make):
  syncer = SYNCER.replace('sys.exit(0)', 'pass')
  run = make([LEARNER], syncer=syncer, options=LaunchOptions(stop_seconds=0.2))

  def act():
    if run.lives(0):
      raise KeyError('a bug of the one who watches')

  with pytest.raises(KeyError, match='who watches'):
    run.run(act)
  assert run.has('stopped')  # It was asked first.


def test_everything_can_be_ended_at_once(make):
  """As at the second Ctrl-C."""
  run = make([STUBBORN, STUBBORN])

  def act():
    if run.lives(0) and run.lives(1):
      run.launcher.kill_all()
      raise SystemExit(130)

  with pytest.raises(SystemExit):
    run.run(act)
  assert not run.has('stopped')


def test_a_folder_that_cannot_be_written(tmp_path, make):
  (tmp_path / 'logs').write_text('a file')
  run = make([LEARNER])
  with pytest.raises(OSError, match='logs'):
    run.run(lambda: None)


# The launcher as a process of its own, in a thread that is not the main one:
# Linux tells children when the *thread* that has started them ends.
LAUNCHER = """
import pathlib, sys, threading, time
from decoupled_diloco.runtime.launch import Launcher
from decoupled_diloco.runtime.launch_options import LaunchOptions
folder, *scripts = sys.argv[1:]
launcher = Launcher(
  LaunchOptions(),
  command=lambda role, m, address, is_again: [
    sys.executable, '-ISc', scripts[m], role, str(m), address, folder
  ],
  num_learners=2,
  workdir=pathlib.Path(folder),
  progress=lambda: 0.0,
  tell=print,
)
launching = threading.Thread(
  target=lambda: launcher.run(lambda: None, poll_seconds=0.002)
)
launching.start()
launching.join()
"""


def is_alive(pid: int) -> bool:
  """Zombies of a dead parent are not: who reaps them is not our concern."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return stat.rpartition(')')[2].split()[0] not in 'ZX'


@pytest.mark.skipif(
  sys.platform != 'linux', reason='Linux alone tells children'
)
def test_nobody_outlives_a_launcher_that_was_killed(tmp_path):
  run = Run(tmp_path, [LEARNER, LEARNER])
  scripts = [PRELUDE + script for script in run.scripts]
  deadline = time.monotonic() + DEADLINE_SECONDS
  root = pathlib.Path(__file__).parents[2]
  with subprocess.Popen(
    [sys.executable, '-c', LAUNCHER, str(tmp_path), *scripts],
    cwd=root,
    env={**os.environ, 'PYTHONPATH': str(root)},
  ) as launcher:
    try:
      while len(run.pids()) < 3:
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.002)
      assert all(map(is_alive, run.pids()))
    finally:
      launcher.send_signal(signal.SIGKILL)
  while any(map(is_alive, run.pids())):
    assert time.monotonic() < deadline
    time.sleep(0.002)
