"""Which frame goes next."""

import xxhash

from decoupled_diloco.protocol.messages import Receipt, RoundOpened
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.scheduler import FrameScheduler
from decoupled_diloco.transport.wire import (
  AcknowledgementFrame,
  ChunkFrame,
  EnvelopeFrame,
  decode_frame,
  encode_frame,
)

OPTIONS = TransportOptions(chunk_bytes=4, window_bytes=8, control_queue=2)


def receipt(round_):
  return Receipt(learner=0, incarnation=1, round=round_)


def next_frame(scheduler, now=0.0):
  piece = scheduler.next_frame(now)
  if piece is None:
    return None
  return decode_frame(piece if isinstance(piece, bytes) else piece.encode())


def control(round_):
  return EnvelopeFrame(RoundOpened(round=round_, fragment=0))


def envelope(message, payload_id, payload):
  return EnvelopeFrame(
    message, payload_id, len(payload), xxhash.xxh3_64_intdigest(payload)
  )


def test_acknowledgements_then_control_then_payloads():
  scheduler = FrameScheduler(OPTIONS, bulk_queue=2)
  scheduler.queue_bulk(receipt(0), b'abcdef')
  assert next_frame(scheduler) == envelope(receipt(0), 1, b'abcdef')
  assert next_frame(scheduler) == ChunkFrame(1, b'abcd')
  # In the middle of a payload, what is urgent goes first; of acknowledgements,
  # the last one says it all.
  scheduler.queue_control(encode_frame(control(0)))
  scheduler.acknowledge(5)
  scheduler.acknowledge(7)
  assert next_frame(scheduler) == AcknowledgementFrame(7)
  assert next_frame(scheduler) == control(0)
  assert next_frame(scheduler) == ChunkFrame(1, b'ef')
  assert next_frame(scheduler) is None


def test_payloads_one_after_the_other():
  scheduler = FrameScheduler(OPTIONS, bulk_queue=2)
  scheduler.queue_bulk(receipt(0), b'ab')
  scheduler.queue_bulk(receipt(1), memoryview(b'cd'))
  assert next_frame(scheduler) == envelope(receipt(0), 1, b'ab')
  assert next_frame(scheduler) == ChunkFrame(1, b'ab')
  assert next_frame(scheduler) == envelope(receipt(1), 2, b'cd')
  assert next_frame(scheduler) == ChunkFrame(2, b'cd')


def test_queues_are_bounded():
  scheduler = FrameScheduler(OPTIONS, bulk_queue=2)
  assert [scheduler.queue_control(b'') for _ in range(3)] == [True, True, False]
  assert [scheduler.queue_bulk(receipt(r), b'x') for r in range(3)] == [
    True,
    True,
    False,
  ]
  assert scheduler.num_unsent == 2
  assert scheduler.drop_oldest() == receipt(0)
  assert scheduler.queue_bulk(receipt(2), b'x')
  assert [scheduler.drop_oldest() for _ in range(3)] == [
    receipt(1),
    receipt(2),
    None,
  ]


def test_the_window_stops_payloads_but_not_control():
  scheduler = FrameScheduler(OPTIONS, bulk_queue=2)
  scheduler.queue_bulk(receipt(0), b'0123456789abcdef')
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
  scheduler = FrameScheduler(OPTIONS, bulk_queue=2)
  scheduler.queue_bulk(receipt(0), b'01234567')
  scheduler.queue_bulk(receipt(1), b'x')
  while next_frame(scheduler) is not None:
    pass
  # Round 0 is sent, and fills the window; round 1 can still be dropped.
  assert scheduler.drop_oldest() == receipt(1)


def test_dropped_is_what_is_not_acknowledged_in_full():
  scheduler = FrameScheduler(OPTIONS, bulk_queue=3)
  for round_ in range(3):
    scheduler.queue_bulk(receipt(round_), b'xyz')
  for _ in range(4):  # Two envelopes, two chunks.
    next_frame(scheduler)
  scheduler.on_acknowledged(3, now=0.0)
  scheduler.queue_bulk(receipt(3), b'xyz')
  next_frame(scheduler)  # The envelope of round 2.
  # Sent but not acknowledged, begun, waiting.
  assert scheduler.drop_bulk() == (receipt(1), receipt(2), receipt(3))
  assert scheduler.drop_bulk() == ()
  assert next_frame(scheduler) is None
