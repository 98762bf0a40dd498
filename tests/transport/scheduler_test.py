"""Which frames go next, and which share a packet."""

import dataclasses

import pytest
import xxhash

from decoupled_diloco.protocol.messages import Receipt, RoundOpened
from decoupled_diloco.transport.options import (
  CHUNK_OVERHEAD_BYTES,
  TransportOptions,
)
from decoupled_diloco.transport.scheduler import FrameScheduler
from decoupled_diloco.transport.wire import (
  AcknowledgementFrame,
  ChunkFrame,
  EnvelopeFrame,
  decode_packet,
  encode_frame,
)

OPTIONS = TransportOptions(chunk_bytes=4, window_bytes=8, control_queue=2)
# Every frame has a packet of its own.
APART = dataclasses.replace(OPTIONS, packet_bytes=1)


def receipt(round_):
  return Receipt(learner=0, incarnation=1, round=round_)


def next_packet(scheduler, now=0.0, *, may_be_bare=True):
  return [
    decode_packet(piece if isinstance(piece, bytes) else piece.encode())[0][0]
    for piece in scheduler.next_packet(now, may_be_bare=may_be_bare)
  ]


def next_frame(scheduler):
  """Of a scheduler that gives one at a time."""
  frames = next_packet(scheduler)
  assert len(frames) <= 1
  return frames[0] if frames else None


def queue_bulk(scheduler, message, payload):
  size = len(encode_frame(envelope(message, 2**64 - 1, bytes(payload))))
  return scheduler.queue_bulk(message, payload, size)


def control(round_):
  return EnvelopeFrame(RoundOpened(round=round_, fragment=0))


def envelope(message, payload_id, payload):
  return EnvelopeFrame(
    message, payload_id, len(payload), xxhash.xxh3_64_intdigest(payload)
  )


def test_acknowledgements_then_control_then_payloads():
  scheduler = FrameScheduler(APART, bulk_queue=2)
  queue_bulk(scheduler, receipt(0), b'abcdef')
  assert next_frame(scheduler) == envelope(receipt(0), 1, b'abcdef')
  assert next_frame(scheduler) == ChunkFrame(1, b'abcd')
  # In the middle of a payload, what is urgent goes first; of acknowledgements,
  # the last one says it all.
  scheduler.queue_control(encode_frame(control(0)))
  scheduler.acknowledge(5)
  scheduler.acknowledge(7)
  assert next_packet(scheduler) == [AcknowledgementFrame(7), control(0)]
  assert next_frame(scheduler) == ChunkFrame(1, b'ef')
  assert next_frame(scheduler) is None


def test_what_is_due_travels_together():
  scheduler = FrameScheduler(OPTIONS, bulk_queue=2)
  queue_bulk(scheduler, receipt(0), b'abcdef')
  queue_bulk(scheduler, receipt(1), b'xy')
  scheduler.queue_control(encode_frame(control(0)))
  scheduler.queue_control(encode_frame(control(1)))
  scheduler.acknowledge(3)
  # 6 and 2 bytes of payload are just the window of 8.
  assert next_packet(scheduler) == [
    AcknowledgementFrame(3),
    control(0),
    control(1),
    envelope(receipt(0), 1, b'abcdef'),
    ChunkFrame(1, b'abcd'),
    ChunkFrame(1, b'ef'),
    envelope(receipt(1), 2, b'xy'),
    ChunkFrame(2, b'xy'),
  ]
  assert next_packet(scheduler) == []


@pytest.mark.parametrize(
  ('missing', 'expected'),
  [(0, [[control(300), control(301)]]), (1, [[control(300)], [control(301)]])],
)
def test_a_packet_is_filled_to_its_size(missing, expected):
  frames = [encode_frame(control(round_)) for round_ in (300, 301)]
  options = dataclasses.replace(
    OPTIONS, packet_bytes=sum(map(len, frames)) - missing
  )
  scheduler = FrameScheduler(options, bulk_queue=1)
  for frame in frames:
    scheduler.queue_control(frame)
  packets = []
  while packet := next_packet(scheduler):
    packets.append(packet)
  assert packets == expected


def test_a_payload_that_fits_costs_one_packet():
  payload = bytes(1000)
  scheduler = FrameScheduler(TransportOptions(), bulk_queue=1)
  queue_bulk(scheduler, receipt(0), payload)
  pieces = scheduler.next_packet(0.0, may_be_bare=True)
  packet = b''.join(
    piece if isinstance(piece, bytes) else piece.encode() for piece in pieces
  )
  # Room is made for the largest numbers there may be; the packet is smaller.
  reserved = len(encode_frame(envelope(receipt(0), 2**64 - 1, payload)))
  reserved += len(payload) + CHUNK_OVERHEAD_BYTES
  assert len(packet) <= reserved
  for packet_bytes, num_frames in [(reserved, 2), (reserved - 1, 1)]:
    options = TransportOptions(packet_bytes=packet_bytes)
    scheduler = FrameScheduler(options, bulk_queue=1)
    queue_bulk(scheduler, receipt(0), payload)
    assert len(next_packet(scheduler)) == num_frames


def test_a_frame_larger_than_a_packet_has_one_to_itself():
  scheduler = FrameScheduler(
    TransportOptions(packet_bytes=1000, chunk_bytes=2000), bulk_queue=2
  )
  payload = bytes(2000)
  queue_bulk(scheduler, receipt(0), payload)
  queue_bulk(scheduler, receipt(1), b'a')
  assert next_packet(scheduler) == [envelope(receipt(0), 1, payload)]
  assert next_packet(scheduler) == [ChunkFrame(1, payload)]
  assert next_packet(scheduler) == [
    envelope(receipt(1), 2, b'a'),
    ChunkFrame(2, b'a'),
  ]


def test_an_acknowledgement_waits_for_company_if_it_may():
  scheduler = FrameScheduler(OPTIONS, bulk_queue=1)
  assert not scheduler.acknowledge(3)
  assert next_packet(scheduler, may_be_bare=False) == []
  scheduler.queue_control(encode_frame(control(0)))
  assert next_packet(scheduler, may_be_bare=False) == [
    AcknowledgementFrame(3),
    control(0),
  ]
  # Once is enough.
  assert next_packet(scheduler) == []
  # A chunk of 4 bytes: the other side may wait for it.
  assert not scheduler.acknowledge(6)
  assert scheduler.acknowledge(7)
  assert next_packet(scheduler, may_be_bare=False) == [AcknowledgementFrame(7)]
  assert not scheduler.acknowledge(8)
  assert next_packet(scheduler, may_be_bare=True) == [AcknowledgementFrame(8)]


def test_payloads_one_after_the_other():
  scheduler = FrameScheduler(APART, bulk_queue=2)
  queue_bulk(scheduler, receipt(0), b'ab')
  queue_bulk(scheduler, receipt(1), memoryview(b'cd'))
  assert next_frame(scheduler) == envelope(receipt(0), 1, b'ab')
  assert next_frame(scheduler) == ChunkFrame(1, b'ab')
  assert next_frame(scheduler) == envelope(receipt(1), 2, b'cd')
  assert next_frame(scheduler) == ChunkFrame(2, b'cd')


def test_queues_are_bounded():
  scheduler = FrameScheduler(APART, bulk_queue=2)
  assert [scheduler.queue_control(b'') for _ in range(3)] == [True, True, False]
  assert [queue_bulk(scheduler, receipt(r), b'x') for r in range(3)] == [
    True,
    True,
    False,
  ]
  assert scheduler.num_unsent == 2
  assert scheduler.drop_oldest() == receipt(0)
  assert queue_bulk(scheduler, receipt(2), b'x')
  assert [scheduler.drop_oldest() for _ in range(3)] == [
    receipt(1),
    receipt(2),
    None,
  ]


def test_the_window_stops_payloads_but_not_control():
  scheduler = FrameScheduler(APART, bulk_queue=2)
  queue_bulk(scheduler, receipt(0), b'0123456789abcdef')
  frames = [next_frame(scheduler) for _ in range(4)]
  # Envelope, two chunks of 4 in a window of 8.
  assert [type(frame) for frame in frames[:3]] == [
    EnvelopeFrame,
    ChunkFrame,
    ChunkFrame,
  ]
  assert frames[3] is None
  scheduler.queue_control(encode_frame(control(0)))
  assert next_frame(scheduler) == control(0)
  assert next_frame(scheduler) is None
  scheduler.on_acknowledged(4, now=0.0)
  assert next_frame(scheduler) == ChunkFrame(1, b'89ab')
  assert next_frame(scheduler) is None


def test_a_payload_is_not_begun_without_room_for_it():
  scheduler = FrameScheduler(APART, bulk_queue=2)
  queue_bulk(scheduler, receipt(0), b'01234567')
  queue_bulk(scheduler, receipt(1), b'x')
  while next_frame(scheduler) is not None:
    pass
  # Round 0 is sent, and fills the window; round 1 can still be dropped.
  assert scheduler.drop_oldest() == receipt(1)


def test_dropped_is_what_is_not_acknowledged_in_full():
  scheduler = FrameScheduler(APART, bulk_queue=3)
  for round_ in range(3):
    queue_bulk(scheduler, receipt(round_), b'xyz')
  for _ in range(4):  # Two envelopes, two chunks.
    next_frame(scheduler)
  scheduler.on_acknowledged(3, now=0.0)
  queue_bulk(scheduler, receipt(3), b'xyz')
  next_frame(scheduler)  # The envelope of round 2.
  # Sent but not acknowledged, begun, waiting.
  assert scheduler.drop_bulk() == (receipt(1), receipt(2), receipt(3))
  assert scheduler.drop_bulk() == ()
  assert next_frame(scheduler) is None
