"""Pipes: what overtakes what, and what is lost."""

import random

import pytest

from decoupled_diloco.simulate.agenda import Agenda
from decoupled_diloco.simulate.connection import Connection, Pipe
from decoupled_diloco.simulate.options import LinkOptions


class _Script:
  """A pipe, and what has arrived when."""

  def __init__(self, max_waiting: int = 2, seed: int = 0, **options):
    self.agenda = Agenda()
    self.pipe = Pipe(
      self.agenda, LinkOptions(**options), max_waiting, random.Random(seed)
    )
    self.arrived = []
    self.dropped = []

  def payload(self, name, num_bytes=10):
    dropped = self.pipe.send_payload(
      name,
      num_bytes,
      lambda is_intact: self.arrived.append((self.agenda.now, name, is_intact)),
    )
    if dropped is not None:
      self.dropped.append(dropped)

  def control(self, name):
    self.pipe.send(lambda: self.arrived.append((self.agenda.now, name, True)))


def test_payloads_queue_and_control_overtakes_them():
  script = _Script(latency_seconds=0.5, bytes_per_second=10.0)
  script.payload('first', 10)
  script.payload('second', 20)
  script.control('control')
  script.agenda.run()
  # The first leaves in 1 s, the second in 2 s after it.
  assert script.arrived == [
    (0.5, 'control', True),
    (1.5, 'first', True),
    (3.5, 'second', True),
  ]


def test_without_a_limit_only_the_latency_counts():
  script = _Script(max_waiting=1, latency_seconds=0.5)
  for name in 'abc':
    script.payload(name)
  script.agenda.run()
  assert [name for _, name, _ in script.arrived] == ['a', 'b', 'c']
  assert {at for at, _, _ in script.arrived} == {0.5}
  assert not script.dropped


def test_the_oldest_that_waits_makes_room():
  script = _Script(max_waiting=2, bytes_per_second=10.0)
  for name in 'abcd':
    script.payload(name)
  script.agenda.run()
  # While 'a' is being sent, two may wait.
  assert script.dropped == ['b']
  assert [name for _, name, _ in script.arrived] == ['a', 'c', 'd']


@pytest.mark.parametrize('on_loss', ['damaged', 'dropped'])
def test_losses(on_loss):
  script = _Script(loss=0.3, on_loss=on_loss)
  for number in range(1000):
    script.payload(number)
  script.agenda.run()
  damaged = sum(not is_intact for _, _, is_intact in script.arrived)
  lost = damaged if on_loss == 'damaged' else len(script.dropped)
  # 300 +- 3 standard deviations of sqrt(1000 * 0.3 * 0.7) = 14.5.
  assert 257 <= lost <= 343
  assert len(script.arrived) == (1000 if on_loss == 'damaged' else 1000 - lost)
  assert damaged == (lost if on_loss == 'damaged' else 0)


def test_what_is_on_its_way_is_lost_with_the_connection():
  agenda = Agenda()
  options = LinkOptions(1.0, 10.0)
  connection = Connection(agenda, 3, options, 1, random.Random(0))
  arrived = []
  connection.up.send(lambda: arrived.append('control'))
  connection.up.send_payload('a', 10, lambda _: arrived.append('a'))
  connection.down.send_payload('b', 1, lambda _: arrived.append('b'))
  agenda.at(1.5, connection.cut)
  agenda.run()
  assert arrived == ['control', 'b']
  assert connection.is_broken


def test_a_finished_pipe_sends_what_it_has_begun():
  script = _Script(bytes_per_second=10.0)
  script.payload('a')
  script.payload('b')
  script.pipe.finish()
  script.agenda.run()
  assert [name for _, name, _ in script.arrived] == ['a']
  assert script.pipe.free_at == 1.0
