"""Stand-ins for the processes of a local run: small scripts without jax.

They talk through files in the run's folder: each life of a learner leaves a
line in `lives-M`, and all end when there is a file `done`. Whatever a test
waits for it looks for in `on_poll`, which has a deadline.
"""

import os
import pathlib
import sys
import time
from collections.abc import Callable

import pytest

from decoupled_diloco.runtime.launch import Launcher
from decoupled_diloco.runtime.launch_options import LaunchOptions

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
    self.announced: list[str] = []
    self.told: list[str] = []  # Everything else.
    self.heard: list[str] = []
    self.progress = 0.0
    self.polls = 0
    self.scripts = [*learners, syncer]  # The syncer is number -1.
    self.launcher = Launcher(
      options,
      command=self._command,
      num_learners=len(learners),
      workdir=folder,
      progress=lambda: self.progress,
      tell=self._take,
      hear=self.heard.append,
    )

  def _take(self, text: str) -> None:
    is_start = text.startswith('Starting ')
    (self.announced if is_start else self.told).append(text)

  def _command(
    self, role: str, learner: int, address: str, is_again: bool
  ) -> list[str]:
    del is_again
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
