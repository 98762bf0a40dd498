"""A cap on payload bytes: kept in every second, and no burden on heartbeats."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.protocol.messages import Heartbeat, Hello
from decoupled_diloco.transport.base import LinkUp, Parcel
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.grpc_link import GrpcLink
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.shaping import Shaper

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


@given(
  st.floats(2_000.0, 1e9),
  st.integers(1, 1 << 19),
  st.lists(st.floats(0.0, 3.0), max_size=5),
)
def test_no_second_has_more_than_a_little_over_the_cap(rate, chunk, pauses):
  shaper = Shaper(rate, chunk)
  # A few seconds' worth, but not too many chunks to look at.
  times = sent(shaper, int(min(3 * rate, 2000 * shaper.chunk_bytes)), pauses)
  start = total = 0
  for end, (now, size) in enumerate(times):
    total += size
    while times[start][0] <= now - 1.0:
      total -= times[start][1]
      start += 1
    assert total <= 1.1 * rate + 2, (end, now)


def test_the_cap_is_reached():
  shaper = Shaper(1e6, 1 << 19)
  times = sent(shaper, 3_000_000, [])
  assert times[-1][0] == pytest.approx(3.0, abs=0.11)


def test_without_a_cap_nothing_waits():
  shaper = Shaper(0.0, 512)
  shaper.on_sent(1 << 40, 1.0)
  assert shaper.seconds_until_free(1.0) == 0.0
  assert shaper.chunk_bytes == 512


def test_both_directions_of_a_connection_keep_to_it():
  """Heartbeats meanwhile arrive at once."""
  rate = 400_000.0
  options = TransportOptions(max_bytes_per_second=rate)
  heard = []
  got = threading.Semaphore(0)

  def take(peer, parcel):
    heard.append((time.monotonic(), parcel.message))
    if isinstance(parcel.message, Hello):
      endpoint.send(peer, parcel.message, bytes(600_000))
    if len(parcel.payload):
      got.release()

  endpoint = GrpcEndpoint('127.0.0.1:0', options)
  endpoint.start(take, lambda peer, reason: None)
  link = GrpcLink(endpoint.address, options)
  link.start()
  try:
    assert link.receive(DEADLINE_SECONDS) == LinkUp()
    began = time.monotonic()
    hello = Hello(learner=0, layout='layout')
    link.send(hello, bytes(600_000))
    delays = []
    for number in range(10):
      time.sleep(0.1)
      at = time.monotonic()
      beat = Heartbeat(0, 1, 'training', number, 0, 1.0)
      link.send(beat)
      while not any(message == beat for _, message in heard):
        assert time.monotonic() < at + DEADLINE_SECONDS
        time.sleep(0.001)
      delays.append(time.monotonic() - at)
    assert got.acquire(timeout=DEADLINE_SECONDS)
    up = time.monotonic() - began
    event = link.receive(DEADLINE_SECONDS)
    assert isinstance(event, Parcel)
    down = time.monotonic() - began - up
    # 1.5 s each at the cap, with 0.1 s at most that may go at once.
    for seconds in (up, down):
      assert 1.35 <= seconds < 10.0
    assert sorted(delays)[len(delays) // 2] < 0.1
  finally:
    link.close(0)
    endpoint.close(0)


def test_nonsense_is_refused():
  for value in (-1.0, float('inf'), float('nan')):
    with pytest.raises(ValueError, match='max_bytes_per_second='):
      TransportOptions(max_bytes_per_second=value)
