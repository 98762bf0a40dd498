"""What comes of frames, good and bad."""

import tracemalloc

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.protocol.messages import Receipt, RoundOpened
from decoupled_diloco.transport.base import Parcel
from decoupled_diloco.transport.options import (
  MAX_PACKET_BYTES,
  TransportOptions,
)
from decoupled_diloco.transport.reassembler import Reassembler
from decoupled_diloco.transport.wire import (
  ChunkFrame,
  EnvelopeFrame,
  WireError,
)

OPTIONS = TransportOptions(max_payload_bytes=64, max_message_bytes=1000)
BULK = Receipt(learner=0, incarnation=1, round=0)
CONTROL = RoundOpened(round=0, fragment=0)


def envelope(payload, payload_id=1, size=None):
  return EnvelopeFrame(
    BULK,
    payload_id,
    len(payload) if size is None else size,
    xxhash.xxh3_64_intdigest(payload),
  )


def feed(reassembler, *frames):
  """All parcels of these frames, each of 10 bytes on the wire."""
  return [p for frame in frames for p in reassembler.feed(frame, 10)]


def test_a_payload_in_chunks_around_a_control_message():
  # Envelope and two chunks are 30 bytes on the wire.
  assert feed(
    Reassembler(OPTIONS),
    envelope(b'abcdef'),
    ChunkFrame(1, b'abcd'),
    EnvelopeFrame(CONTROL),
    ChunkFrame(1, b'ef'),
  ) == [Parcel(CONTROL, b'', True, 10), Parcel(BULK, b'abcdef', True, 30)]


def test_payloads_are_read_only():
  (parcel,) = feed(Reassembler(OPTIONS), envelope(b'a'), ChunkFrame(1, b'a'))
  assert memoryview(parcel.payload).readonly


@pytest.mark.parametrize(
  'chunks',
  [[b'abcdeX'], [b'abc', b'deX'], [b'abcdef!'], [b'abc', b'defg']],
  ids=['checksum', 'checksum in the second', 'too long', 'too long later'],
)
def test_a_spoilt_payload_is_not_intact(chunks):
  reassembler = Reassembler(OPTIONS)
  parcels = feed(
    reassembler, envelope(b'abcdef'), *[ChunkFrame(1, c) for c in chunks]
  )
  assert parcels == [Parcel(BULK, b'', False, 10 + 10 * len(chunks))]
  # All of it has been sent, so all of it is acknowledged.
  assert reassembler.received_bytes == sum(map(len, chunks))
  # The next one is as good as ever.
  (parcel,) = feed(reassembler, envelope(b'xyz', 2), ChunkFrame(2, b'xyz'))
  assert parcel.payload == b'xyz'


def test_a_payload_that_is_cut_off_is_not_intact():
  assert feed(
    Reassembler(OPTIONS),
    envelope(b'abcdef'),
    ChunkFrame(1, b'abc'),
    envelope(b'xyz', 2),
    ChunkFrame(2, b'xyz'),
  ) == [Parcel(BULK, b'', False, 20), Parcel(BULK, b'xyz', True, 20)]


@pytest.mark.parametrize(
  ('frames', 'match'),
  [
    ([ChunkFrame(1, b'a')], 'of payload 1, not on now'),
    ([envelope(b'ab'), ChunkFrame(2, b'a')], 'of payload 2'),
    ([envelope(b'ab'), ChunkFrame(1, b'')], 'empty'),
    (
      [envelope(b'a'), ChunkFrame(1, b'a'), ChunkFrame(1, b'a')],
      'of payload 1, not on now',
    ),
    ([envelope(b'', size=65)], 'max_payload_bytes=64'),
    ([envelope(b'', size=2**64 - 1)], 'max_payload_bytes=64'),
  ],
)
def test_what_no_sender_of_ours_would_send_is_a_wire_error(frames, match):
  with pytest.raises(WireError, match=match):
    feed(Reassembler(OPTIONS), *frames)


@pytest.mark.parametrize(
  ('frame', 'size', 'match'),
  [
    (EnvelopeFrame(CONTROL), 1001, 'max_message_bytes=1000'),
    (ChunkFrame(1, b'a'), MAX_PACKET_BYTES + 1, 'larger than 4194304'),
  ],
)
def test_large_frames_are_a_wire_error(frame, size, match):
  with pytest.raises(WireError, match=match):
    Reassembler(OPTIONS).feed(frame, size)


def test_a_payload_that_is_only_announced_costs_nothing():
  reassembler = Reassembler(TransportOptions(max_payload_bytes=1 << 62))
  tracemalloc.start()
  try:
    feed(reassembler, envelope(b'', size=1 << 40), ChunkFrame(1, b'abc'))
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < 100_000


chunks = st.builds(ChunkFrame, st.integers(0, 2), st.binary(max_size=40))
envelopes = st.builds(
  EnvelopeFrame,
  st.sampled_from([BULK, CONTROL]),
  st.integers(0, 2),
  st.integers(0, 70),
  st.sampled_from([0, xxhash.xxh3_64_intdigest(b'')]),
)


@given(st.lists(chunks | envelopes, max_size=40))
def test_any_frames_give_parcels_or_one_wire_error(frames):
  reassembler = Reassembler(OPTIONS)
  for frame in frames:
    try:
      parcels = reassembler.feed(frame, 10)
    except WireError:
      return
    for parcel in parcels:
      assert len(parcel.payload) <= 64
      assert parcel.is_intact or parcel.payload == b''
