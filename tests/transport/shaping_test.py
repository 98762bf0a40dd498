"""A cap on payload bytes: kept in every second, and no burden on heartbeats."""

import collections
import queue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.protocol.messages import (
  Heartbeat,
  Hello,
  Message,
  Receipt,
)
from decoupled_diloco.transport.base import LinkUp, Parcel
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.grpc_link import GrpcLink
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.shaping import Shaper
from decoupled_diloco.transport.stream import FrameStream
from decoupled_diloco.transport.wire import (
  ChunkFrame,
  EnvelopeFrame,
  Frame,
  decode_packet,
)

DEADLINE_SECONDS = 30.0


def sent(shaper: Shaper, num_bytes: int, pauses: list[float]):
  """When what goes, if so many bytes go as soon as they may."""
  now, times, left = 0.0, [], num_bytes
  pauses = list(pauses)
  while left:
    wait = shaper.seconds_until_free(now)
    now += wait
    if pauses and not wait:
      now += pauses.pop()  # Nothing was there to be sent.
    size = min(shaper.chunk_bytes, left)
    shaper.on_sent(size, now)
    times.append((now, size))
    left -= size
  return times


def beat(number: int) -> Heartbeat:
  return Heartbeat(0, 1, 'training', number, 0, 1.0)


def receipt(round_: int) -> Receipt:
  return Receipt(learner=0, incarnation=1, round=round_)


def largest_in_a_second(sent: list[tuple[float, int]]) -> int:
  """The most bytes in any second."""
  largest = total = start = 0
  for now, size in sent:
    total += size
    while sent[start][0] <= now - 1.0:
      total -= sent[start][1]
      start += 1
    largest = max(largest, total)
  return largest


@given(
  st.floats(2_000.0, 1e9),
  st.integers(1, 1 << 19),
  st.lists(st.floats(0.0, 3.0), max_size=5),
)
def test_no_second_has_more_than_a_little_over_the_cap(rate, chunk, pauses):
  shaper = Shaper(rate, chunk)
  # A few seconds' worth, but not too many chunks to look at.
  times = sent(shaper, int(min(3 * rate, 2000 * shaper.chunk_bytes)), pauses)
  assert largest_in_a_second(times) <= 1.1 * rate + 2


def test_the_cap_is_reached():
  shaper = Shaper(1e6, 1 << 19)
  times = sent(shaper, 3_000_000, [])
  assert times[-1][0] == pytest.approx(3.0, abs=0.11)


def test_without_a_cap_nothing_waits():
  shaper = Shaper(0.0, 512)
  shaper.on_sent(1 << 40, 1.0)
  assert shaper.seconds_until_free(1.0) == 0.0
  assert shaper.chunk_bytes == 512


class Line:
  """Carries the packets of a stream, on a clock of its own.

  Time passes only while a packet is carried, and while the stream waits; what
  is sent meanwhile is sent at its moment. All of it happens in one thread.
  """

  def __init__(self, options: TransportOptions, bytes_per_second: float):
    self.now = 0.0
    self._rate = bytes_per_second
    self._planned: collections.deque[tuple[float, Message]] = (
      collections.deque()
    )
    self.taken: list[tuple[float, list[Frame]]] = []
    self.near = self._new_stream(options)
    self._far = self._new_stream(options)

  def _new_stream(self, options: TransportOptions) -> FrameStream:
    return FrameStream(
      options,
      lambda: self.now,
      bulk_queue=10,
      receive_queue=10,
      wait=self._wait,
    )

  def carry(self, num_payloads: int, beats: list[float]) -> list[Message]:
    """Goes on until as many payloads, and a heartbeat per moment, are there."""
    self._planned.extend((at, beat(n)) for n, at in enumerate(beats))
    arrived = []
    for packet in self.near.packets():
      frames = [frame for frame, _ in decode_packet(packet)]
      self.taken.append((self.now, frames))
      self._pass(self.now + len(packet) / self._rate)
      for parcel in self._far.feed(packet):
        arrived.append(parcel.message)
        self._far.settle(parcel)
      while (answer := self._far.next_packet()) is not None:
        self.near.feed(answer)
      if len(arrived) == num_payloads + len(beats):
        break
    return arrived

  def _wait(self, condition, seconds: float | None) -> bool:
    assert seconds is not None or self._planned, 'Nothing would ever wake it.'
    over = float('inf') if seconds is None else self.now + seconds
    if self._planned and self._planned[0][0] <= over:
      self._pass(max(self._planned[0][0], self.now))
      return True
    self.now = over
    return False

  def _pass(self, until: float):
    while self._planned and self._planned[0][0] <= until:
      at, message = self._planned.popleft()
      self.now = max(at, self.now)
      assert self.near.send_or_drop(message, b'') == ()
    self.now = until


# A line that could carry more than the cap, one that is the narrow part itself,
# and one without a cap; all have more to carry than they can, all the time.
@pytest.mark.parametrize(('cap', 'line'), [(4e5, 4e6), (4e5, 2e5), (0.0, 4e5)])
@given(
  beats=st.lists(st.floats(0.0, 3.0), max_size=20).map(sorted),
  pause=st.floats(0.0, 2.0),
)
def test_payloads_keep_to_the_cap_and_heartbeats_go_ahead(
  cap, line, beats, pause
):
  options = TransportOptions(max_bytes_per_second=cap, chunk_bytes=50_000)
  carrier = Line(options, line)
  for round_ in range(3):
    assert carrier.near.send_or_drop(receipt(round_), bytes(400_000)) == ()
  arrived = carrier.carry(3, beats)
  assert [m for m in arrived if isinstance(m, Heartbeat)] == [
    beat(number) for number in range(len(beats))
  ]
  # What was not used for a while must not be made up for.
  carrier.now += pause
  assert carrier.near.send_or_drop(receipt(3), bytes(600_000)) == ()
  assert carrier.carry(1, []) == [receipt(3)]

  chunks = [
    (now, len(frame.data))
    for now, frames in carrier.taken
    for frame in frames
    if isinstance(frame, ChunkFrame)
  ]
  assert sum(size for _, size in chunks) == 1_800_000
  if cap:
    assert largest_in_a_second(chunks) <= 1.1 * cap
    # 3 s at the cap of 400 kB/s, and 1.5 s; 0.05 s worth may go at once.
    assert chunks[-1][0] >= 4.4
  # A packet has 64 KiB at most here, and some bytes for an acknowledgement.
  longest = (options.packet_bytes + 100) / line
  for now, frames in carrier.taken:
    is_bulk = [
      isinstance(frame, ChunkFrame)
      or (isinstance(frame, EnvelopeFrame) and frame.payload_size > 0)
      for frame in frames
    ]
    assert is_bulk == sorted(is_bulk)
    for frame in frames:
      if isinstance(frame, EnvelopeFrame) and not frame.payload_size:
        assert isinstance(frame.message, Heartbeat)
        sent_at = beats[frame.message.total_steps]
        assert sent_at <= now <= sent_at + longest


def test_both_directions_of_a_connection_keep_to_it():
  """Over gRPC; time stands still but where the test lets it pass."""
  rate, step_seconds, size = 400_000.0, 0.1, 600_000
  now = 0.0
  options = TransportOptions(max_bytes_per_second=rate)
  heard = queue.Queue()
  endpoint = GrpcEndpoint('127.0.0.1:0', options, clock=lambda: now)
  endpoint.start(lambda *arrival: heard.put(arrival), lambda *_: None)
  link = GrpcLink(endpoint.address, options, clock=lambda: now)
  link.start()

  def up() -> Message:
    return heard.get(timeout=DEADLINE_SECONDS)[1].message

  def down() -> Message:
    event = link.receive(DEADLINE_SECONDS)
    assert isinstance(event, Parcel)
    return event.message

  try:
    assert link.receive(DEADLINE_SECONDS) == LinkUp()
    hello = Hello(learner=0, layout='layout')
    link.send(hello)
    peer, parcel = heard.get(timeout=DEADLINE_SECONDS)
    assert parcel.message == hello
    before = endpoint.peer_bytes(peer)
    last = receipt(0)
    link.send(last, bytes(size))
    assert endpoint.send(peer, last, bytes(size))
    missing = {'up', 'down'}
    received = [before]
    # Its 1.5 s take as many steps of 0.1 s, or more if a thread is late.
    while missing:
      number = len(received)
      assert number < 300, received
      link.send(beat(number))
      assert endpoint.send(peer, beat(number))
      # The heartbeats arrive though no time passes; a payload may be there
      # before them, if that was its last chunk.
      for direction, take in (('up', up), ('down', down)):
        if (message := take()) == last:
          missing.remove(direction)
          message = take()
        assert message == beat(number)
      received.append(endpoint.peer_bytes(peer))
      now += step_seconds
    for direction in ('sent', 'received'):
      totals = [getattr(each, direction) for each in received]
      assert totals[-1] - totals[0] > size
      # 10 steps are a second. 100 bytes are more than a heartbeat takes; and
      # what was due at the end of one step may count for the next.
      for end, total in enumerate(totals):
        assert total - totals[max(end - 10, 0)] - 10 * 100 <= 1.3 * rate
  finally:
    link.close(0)
    endpoint.close(0)


def test_nonsense_is_refused():
  for value in (-1.0, float('inf'), float('nan')):
    with pytest.raises(ValueError, match='max_bytes_per_second='):
      TransportOptions(max_bytes_per_second=value)
