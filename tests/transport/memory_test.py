"""What is particular to the transport in memory: faults and steps to order."""

import threading

import pytest

from decoupled_diloco.protocol.messages import (
  Contribution,
  Hello,
  RoundOpened,
)
from decoupled_diloco.transport.base import LinkDown, LinkUp, Parcel
from decoupled_diloco.transport.memory import MemoryNetwork
from decoupled_diloco.transport.memory_ends import MemoryLink
from decoupled_diloco.transport.options import TransportOptions

DEADLINE_SECONDS = 30
HELLO = Hello(learner=0, layout='layout')
# Every frame is a packet.
OPTIONS = TransportOptions(packet_bytes=1, chunk_bytes=4, window_bytes=64)


def contribution(round_):
  return Contribution(
    learner=0,
    incarnation=1,
    round=round_,
    fragment=0,
    base_version=0,
    steps=1,
    tokens=1,
    total_steps=1,
    total_tokens=1,
    step_seconds=0.1,
  )


def opened(round_):
  return RoundOpened(round=round_, fragment=0)


def new_network():
  """A network with an endpoint, whose arrivals go to a list."""
  network = MemoryNetwork(OPTIONS)
  arrivals = []
  endpoint = network.endpoint()
  endpoint.start(
    lambda peer, parcel: arrivals.append((peer, parcel.message)),
    lambda peer, reason: arrivals.append((peer, reason)),
  )
  return network, endpoint, arrivals


def new_link(network):
  link = network.link()
  link.start()
  network.deliver()
  assert link.receive(1000) == LinkUp()
  return link


def test_nothing_happens_before_it_is_delivered():
  network, _, arrivals = new_network()
  link = network.link()
  link.start()
  # No time passes here, so a time limit is not waited for.
  assert link.receive(1000) is None
  network.deliver()
  assert link.receive(1000) == LinkUp()
  link.send(HELLO)
  assert arrivals == []
  assert network.deliver() == 1
  assert arrivals == [(1, HELLO)]
  assert network.deliver() == 0


def test_some_packets_at_a_time():
  network, _, arrivals = new_network()
  link = new_link(network)
  link.send(contribution(0), b'12345678')
  # The envelope, a chunk and its acknowledgement, but not the second chunk.
  assert network.deliver(max_packets=3) == 3
  link.send(HELLO)
  network.deliver()
  assert arrivals == [(1, HELLO), (1, contribution(0))]


def test_what_is_sent_from_a_callback_is_delivered_too():
  network = MemoryNetwork(OPTIONS)
  endpoint = network.endpoint()
  endpoint.start(
    lambda peer, parcel: endpoint.send(peer, opened(7)), lambda *_: None
  )
  link = new_link(network)
  link.send(HELLO)
  network.deliver()
  parcel = link.receive(0)
  assert parcel is not None
  assert parcel.message == opened(7)  # pyright: ignore


def test_the_same_calls_give_the_same_order():
  def play():
    network, endpoint, arrivals = new_network()
    links = [new_link(network) for _ in range(3)]
    for round_ in range(5):
      for link in links:
        link.send(contribution(round_), bytes(10 * round_))
        link.send(HELLO)
      for peer in (1, 2, 3):
        endpoint.send(peer, opened(round_))
      network.deliver(max_packets=7)
    network.deliver()
    return arrivals

  assert play() == play()


def test_a_partition_is_silent_until_it_is_noticed():
  network, endpoint, arrivals = new_network()
  link = new_link(network)
  network.partition(link)
  link.send(HELLO)
  endpoint.send(1, opened(0))
  network.deliver()
  assert (arrivals, link.receive(0)) == ([], None)
  # As over TCP, what was sent arrives when it heals in time.
  network.heal(link)
  network.deliver()
  assert arrivals == [(1, HELLO)]
  assert link.receive(0) is not None


def test_a_partition_that_is_noticed_ends_the_connection():
  network, _, arrivals = new_network()
  link = new_link(network)
  network.partition(link)
  link.send(contribution(0), b'abc')
  network.sever(link, 'no answer to a ping')
  network.deliver()
  assert arrivals == [(1, 'no answer to a ping')]
  assert link.receive(0) == LinkDown('no answer to a ping', (contribution(0),))
  # There is no way to connect, until there is.
  assert link.receive(0) is None
  network.heal(link)
  network.deliver()
  assert link.receive(0) == LinkUp()
  link.send(HELLO)
  network.deliver()
  assert arrivals[-1] == (2, HELLO)


def test_one_side_can_give_up_without_the_other():
  network, endpoint, arrivals = new_network()
  link = new_link(network)
  network.partition(link)
  endpoint.disconnect(1, 'silent for too long')
  network.deliver()
  assert arrivals == [(1, 'silent for too long')]
  assert not endpoint.send(1, opened(0))
  # The learner, cut off, still believes in its connection.
  assert link.send(HELLO) == ()
  assert link.receive(0) is None
  network.heal(link)
  network.deliver()
  assert isinstance(link.receive(0), LinkDown)
  assert link.receive(0) == LinkUp()
  # What it sent in that belief went nowhere.
  assert arrivals == [(1, 'silent for too long')]


def test_an_endpoint_that_dies_while_a_link_is_cut_off():
  network, endpoint, arrivals = new_network()
  link = new_link(network)
  network.partition(link)
  endpoint.close(0)
  assert len(arrivals) == 1
  network.endpoint().start(lambda *_: None, lambda *_: None)
  network.heal(link)
  network.deliver()
  assert isinstance(link.receive(0), LinkDown)
  assert link.receive(0) == LinkUp()


def test_a_full_endpoint_lets_nobody_else_in():
  network = MemoryNetwork(OPTIONS)
  endpoint = network.endpoint(max_peers=1)
  endpoint.start(lambda *_: None, lambda *_: None)
  first = new_link(network)
  second = network.link()
  second.start()
  network.deliver()
  assert second.receive(0) is None
  first.close(1)
  network.deliver()
  assert second.receive(0) == LinkUp()


def test_one_packet_may_hold_more_than_the_inbox_has_room_for():
  network = MemoryNetwork()
  endpoint = network.endpoint()
  endpoint.start(lambda *_: None, lambda *_: None)
  link = network.link()
  link.start()
  network.deliver()
  # With the LinkUp that nobody has looked at, these are one too many; and who
  # would have to make room is who delivers.
  for round_ in range(1024):
    assert endpoint.send(1, opened(round_))
  assert network.deliver() == 1
  assert link.receive(0) == LinkUp()
  for round_ in range(1024):
    event = link.receive(0)
    assert isinstance(event, Parcel)
    assert event.message == opened(round_)


class TalkativeLock:
  """Lets something happen just after it was released."""

  def __init__(self):
    self._lock = threading.Lock()
    self.then = lambda: None

  def __enter__(self):
    self._lock.acquire()

  def __exit__(self, *_):
    self._lock.release()
    self.then()


def test_one_delivers_at_a_time(monkeypatch):
  network = MemoryNetwork(OPTIONS)
  heard, is_heard, goes_on = [], threading.Event(), threading.Event()

  def on_parcel(peer, parcel):
    heard.append(parcel.message)
    is_heard.set()
    goes_on.wait(DEADLINE_SECONDS)

  network.endpoint().start(on_parcel, lambda *_: None)
  link = new_link(network)
  lock = TalkativeLock()
  monkeypatch.setattr(network, '_lock', lock)
  other = threading.Thread(target=network.deliver)

  def when_nobody_delivers():
    # Whoever delivered has just found that there is nothing to deliver.
    if not network._is_delivering:
      lock.then = lambda: None
      link.send(opened(0))
      link.send(opened(1))
      other.start()
      assert is_heard.wait(DEADLINE_SECONDS)

  lock.then = when_nobody_delivers
  assert network.deliver() == 0
  # The other thread does now, and is not done with the first message.
  assert network.deliver() == 0
  assert heard == [opened(0)]
  goes_on.set()
  other.join()
  assert heard == [opened(0), opened(1)]


class Fleeting(MemoryLink):
  """Its connection ends whenever somebody has looked at it."""

  def __getattribute__(self, name):
    value = super().__getattribute__(name)
    if name in ('connection', '_announced'):
      setattr(self, name, None)
    return value


@pytest.mark.parametrize(
  'use',
  [
    lambda link: link.send(HELLO),
    lambda link: link.bytes_sent,
    lambda link: link.bytes_received,
    lambda link: link.close(1),
  ],
  ids=['send', 'bytes_sent', 'bytes_received', 'close'],
)
def test_a_connection_may_end_in_another_thread_at_any_moment(use):
  network, _, _ = new_network()
  link = new_link(network)
  link.__class__ = Fleeting
  use(link)
