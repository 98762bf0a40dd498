"""The launcher, with stand-ins for its processes: small scripts without jax.

Stand-ins talk through files in the run's folder: each life of a learner leaves
a line in `lives-M`, and all end when there is a file `done`. Whatever a test
waits for it looks for in `on_poll`, which has a deadline.
"""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from decoupled_diloco.runtime.launch import (
  EXIT_USAGE,
  Launcher,
  LaunchError,
  LaunchOptions,
)

DEADLINE_SECONDS = 60.0

# Common to all stand-ins; none outlives a broken test for long.
PRELUDE = """
import os, pathlib, signal, sys, time
role, m, address, folder = sys.argv[1:]
folder = pathlib.Path(folder)
end = time.monotonic() + 100

def has(name):
  return (folder / name).exists()

def until(condition):
  while not condition():
    if time.monotonic() > end:
      sys.exit('the test has forgotten this process')
    time.sleep(0.002)

def write(name, text):
  unfinished = folder / f'{name}.{os.getpid()}'
  unfinished.write_text(text)
  unfinished.replace(folder / name)

def live():
  cores = sorted(os.sched_getaffinity(0))
  with open(folder / f'lives-{m}', 'a') as lives:
    lives.write(f'{os.getpid()} {os.getsid(0)} {address} {cores}\\n')
"""
SYNCER = """
def stop(*_):
  write('stopped', '')
  sys.exit(0)

signal.signal(signal.SIGTERM, stop)
write('syncer-pid', str(os.getpid()))
write('address', 'host:1\\n')
until(lambda: has('done'))
"""
LEARNER = """
print('I am learner', m, flush=True)
live()
until(lambda: has('done') or has('stopped'))
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
live()
until(lambda: False)
"""
CRASHING = """
live()
print('out of luck', flush=True)
sys.exit(1)
"""
QUICK = LaunchOptions(restart_seconds=0.0, stop_seconds=30.0)


class Run:
  """A launcher of stand-ins, and what they have left behind."""

  def __init__(
    self,
    folder: pathlib.Path,
    learners: list[str],
    syncer: str = SYNCER,
    options: LaunchOptions = QUICK,
  ):
    self.folder = folder
    self.told: list[str] = []
    self.progress = 0.0
    self.polls = 0
    self.scripts = [*learners, syncer]  # The syncer is number -1.
    self.launcher = Launcher(
      options,
      command=self._command,
      num_learners=len(learners),
      workdir=folder,
      progress=lambda: self.progress,
      tell=self.told.append,
    )

  def _command(self, role: str, learner: int, address: str) -> list[str]:
    script = PRELUDE + self.scripts[learner]
    given = [role, str(learner), address, str(self.folder)]
    return [sys.executable, '-ISc', script, *given]

  def until(self, condition: Callable[[], bool]) -> None:
    """Runs; when the condition is met, the run is done."""

    def act() -> None:
      if condition():
        self.touch('done')

    self.run(act)

  def run(self, act: Callable[[], None]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS

    def on_poll() -> None:
      self.polls += 1
      assert time.monotonic() < deadline, self.told
      act()

    self.launcher.run(on_poll, poll_seconds=0.002)

  def touch(self, name: str) -> None:
    (self.folder / name).touch()

  def has(self, name: str) -> bool:
    return (self.folder / name).exists()

  def lives(self, learner: int) -> list[list[str]]:
    path = self.folder / f'lives-{learner}'
    if not path.exists():
      return []
    lines = path.read_text().splitlines()
    return [line.split(maxsplit=3) for line in lines]

  def log(self, name: str) -> str:
    return (self.folder / 'logs' / f'{name}.log').read_text()

  def pids(self) -> list[int]:
    """Of every process that has ever lived and said so."""
    pids = [
      int(life[0])
      for learner in range(len(self.scripts) - 1)
      for life in self.lives(learner)
    ]
    if self.has('syncer-pid'):
      pids.append(int((self.folder / 'syncer-pid').read_text()))
    return pids

  def assert_nobody_is_left(self) -> None:
    for pid in self.pids():
      with pytest.raises(ProcessLookupError):  # Not even as a zombie.
        os.kill(pid, 0)


@pytest.fixture
def make(tmp_path):
  """Makes runs, and looks after each test whether anything is left of them."""
  runs = []

  def make_run(*args, **kwargs) -> Run:
    runs.append(Run(tmp_path, *args, **kwargs))
    return runs[-1]

  yield make_run
  for run in runs:
    run.assert_nobody_is_left()
  # A process or file that was left open would warn now, which is an error.
  runs.clear()
  gc.collect()


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


def test_a_syncer_that_never_listens(make):
  syncer = "write('syncer-pid', str(os.getpid()))\nuntil(lambda: False)"
  options = LaunchOptions(start_seconds=0.05)
  run = make([LEARNER], syncer=syncer, options=options)
  with pytest.raises(LaunchError, match=r'start_seconds=0\.05; see .*syncer'):
    run.run(lambda: None)


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
    'learner 1 is dead (exit code 1)',
    'learner 1 starts again',
  ] * 2 + [
    'learner 1 has died 3 times; the run goes on without it (see '
    f'{run.folder / "logs" / "learner-1.log"})'
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
  assert run.told == ['learner 1 is dead (exit code 1)']


def test_without_any_learner_left_the_run_ends(make):
  options = LaunchOptions(restart_seconds=0.0, max_restarts=1)
  run = make([CRASHING, CRASHING], options=options)
  with pytest.raises(LaunchError, match='No learner is left'):
    run.run(lambda: None)
  assert [len(run.lives(m)) for m in range(2)] == [2, 2]


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


def test_a_folder_that_cannot_be_written(tmp_path, make):
  (tmp_path / 'logs').write_text('a file')
  run = make([LEARNER])
  with pytest.raises(OSError, match='logs'):
    run.run(lambda: None)


# The launcher as a process of its own, in a thread that is not the main one:
# Linux tells children when the *thread* that has started them ends.
LAUNCHER = """
import pathlib, sys, threading, time
from decoupled_diloco.runtime.launch import Launcher, LaunchOptions
folder, *scripts = sys.argv[1:]
launcher = Launcher(
  LaunchOptions(),
  command=lambda role, m, address: [
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


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'max_restarts': -1}, 'max_restarts=-1 must not be negative'),
    ({'restart_seconds': -0.5}, 'restart_seconds=-0.5 must not be'),
    ({'start_seconds': 0}, 'start_seconds=0 must be positive'),
    ({'stop_seconds': 0.0}, 'stop_seconds=0.0 must be positive'),
    ({'kill': ((1, 1.0),)}, r'kill=\(\(1, 1.0\),\): .* between 0 and 1'),
    ({'kill': ((1, 0.0),)}, r'kill=\(\(1, 0.0\),\): .* between 0 and 1'),
  ],
)
def test_options_check_themselves(settings, message):
  with pytest.raises(ValueError, match=message):
    LaunchOptions(**settings)


def test_kills_may_come_as_lists():
  """As configs give them."""
  options = LaunchOptions(kill=[[2, '0.5']])  # pyright: ignore
  assert options.kill == ((2, 0.5),)
