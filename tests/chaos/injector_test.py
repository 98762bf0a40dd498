"""Faults befall whoever runs when they are due, and end when they should."""

import itertools
import signal

import pytest

from decoupled_diloco.chaos.injector import Injector
from decoupled_diloco.chaos.schedule import Fault


class FakeProcess:
  def __init__(self, pid: int):
    self.pid = pid
    self.signals: list[int] = []

  def send_signal(self, sig: int, /) -> None:
    self.signals.append(sig)


class FakeLinks:
  def __init__(self):
    self.calls = []

  def set_cut(self, learner, is_cut):
    self.calls.append(('cut', learner, is_cut))

  def set_bandwidth(self, learner, bytes_per_second):
    self.calls.append(('bandwidth', learner, bytes_per_second))

  def flip_bit(self, learner):
    self.calls.append(('flip', learner))


class Scene:
  """Three learners and a syncer, at a time that the test says."""

  def __init__(self, *faults):
    self.now = 100.0
    self.pids = itertools.count(10)
    self.running: dict[int | str, FakeProcess] = {
      whom: FakeProcess(next(self.pids)) for whom in (0, 1, 2, 'syncer')
    }
    self.links = FakeLinks()
    self.told = []
    self.injector = Injector(
      iter(faults),
      process=lambda whom: self.running.get(whom),
      links=self.links,
      slow_bytes_per_second=1000.0,
      tell=self.told.append,
      clock=lambda: self.now,
      unix_time=lambda: 1e9 + self.now,
    )

  def at(self, seconds):
    """So many seconds after it has begun."""
    self.now = 100.0 + seconds
    self.injector.poll()


def test_nothing_happens_before_it_begins():
  scene = Scene(Fault(1.0, 'kill', (0,)))
  scene.at(-50.0)
  scene.at(50.0)
  assert not scene.injector.struck and not scene.injector.has_begun


def test_kills():
  scene = Scene(
    Fault(1.0, 'kill', (0,)),
    Fault(2.0, 'site', (1, 2)),
    Fault(3.0, 'syncer', ()),
  )
  scene.injector.begin()
  scene.at(0.9)
  assert not scene.injector.struck
  scene.at(1.1)
  assert scene.running[0].signals == [signal.SIGKILL]
  [struck] = scene.injector.struck
  assert struck.at == 1e9 + 101.1
  assert (struck.learners, struck.pids) == ((0,), (10,))
  assert scene.told == ['Kills learner 0']
  scene.at(3.5)  # Two are due at once.
  for whom in (1, 2, 'syncer'):
    assert scene.running[whom].signals == [signal.SIGKILL]
  assert [s.pids for s in scene.injector.struck] == [(10,), (11, 12), (13,)]


def test_whoever_is_dead_is_spared():
  scene = Scene(Fault(1.0, 'kill', (0,)), Fault(2.0, 'site', (0, 1)))
  scene.injector.begin()
  del scene.running[0]
  scene.at(2.0)
  first, second = scene.injector.struck
  assert not first.is_effective
  assert scene.told[0] == 'Kills learner 0: it is dead already'
  assert second.learners == (1,)


def test_a_freeze_ends():
  scene = Scene(Fault(1.0, 'freeze', (2,), 3.0))
  scene.injector.begin()
  scene.at(1.0)
  assert scene.running[2].signals == [signal.SIGSTOP]
  scene.at(3.9)
  assert scene.running[2].signals == [signal.SIGSTOP]
  scene.at(4.0)
  assert scene.running[2].signals == [signal.SIGSTOP, signal.SIGCONT]


def test_a_process_that_took_the_place_of_a_frozen_one_is_left_alone():
  scene = Scene(Fault(1.0, 'freeze', (2,), 3.0))
  scene.injector.begin()
  scene.at(1.0)
  scene.running[2] = FakeProcess(99)
  scene.at(5.0)
  assert scene.running[2].signals == []


@pytest.mark.parametrize(
  'kind, begins, ends',
  [
    ('partition', ('cut', 1, True), ('cut', 1, False)),
    ('slow', ('bandwidth', 1, 1000.0), ('bandwidth', 1, None)),
  ],
)
def test_links(kind, begins, ends):
  scene = Scene(Fault(1.0, kind, (1,), 5.0), Fault(2.0, kind, (1,), 1.0))
  scene.injector.begin()
  scene.at(1.0)
  assert scene.links.calls == [begins]
  scene.at(2.0)
  scene.at(4.0)  # The second is over, the first lasts.
  assert scene.links.calls == [begins, begins]
  scene.at(6.5)
  assert scene.links.calls == [begins, begins, ends]


def test_a_bit_is_flipped_once():
  scene = Scene(Fault(1.0, 'corrupt', (0,)))
  scene.injector.begin()
  scene.at(1.0)
  scene.injector.finish()
  assert scene.links.calls == [('flip', 0)]


def test_finishing_ends_all_that_lasts():
  scene = Scene(
    Fault(1.0, 'freeze', (0,), 60.0),
    Fault(1.0, 'partition', (1,), 60.0),
    Fault(9.0, 'kill', (2,)),
  )
  scene.injector.begin()
  scene.at(1.0)
  scene.injector.finish()
  assert scene.running[0].signals[-1] == signal.SIGCONT
  assert scene.links.calls[-1] == ('cut', 1, False)
  scene.at(99.0)
  assert scene.running[2].signals == []
