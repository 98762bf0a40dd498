"""One side of a connection, without anything that carries its packets."""

import contextlib
import dataclasses
import queue
import threading

import pytest

from decoupled_diloco.protocol.messages import Receipt, RoundOpened
from decoupled_diloco.transport.options import (
  MAX_PACKET_BYTES,
  TransportOptions,
)
from decoupled_diloco.transport.stream import FrameStream
from decoupled_diloco.transport.wire import (
  AcknowledgementFrame,
  ClosingFrame,
  EnvelopeFrame,
  WireError,
  decode_packet,
  encode_frame,
)

# Every frame is a packet.
OPTIONS = TransportOptions(
  packet_bytes=1,
  chunk_bytes=4,
  window_bytes=8,
  control_queue=2,
  stall_seconds=50.0,
)
# Nothing that waits for company ever travels alone; in FAST it does at once.
SLOW = TransportOptions(
  acknowledge_seconds=1000.0, bulk_delay_seconds=1000.0, stall_seconds=1000.0
)
FAST = TransportOptions(acknowledge_seconds=0.001)
DEADLINE_SECONDS = 30
CONTROL = RoundOpened(round=0, fragment=0)


def receipt(round_):
  return Receipt(learner=0, incarnation=1, round=round_)


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


def new_stream(clock=None, bulk_queue=2, receive_queue=1, options=OPTIONS):
  return FrameStream(
    options,
    clock or Clock(),
    bulk_queue=bulk_queue,
    receive_queue=receive_queue,
  )


def carry(source, target):
  """Moves all packets that are due; returns the parcels they make."""
  parcels = []
  while (packet := source.next_packet()) is not None:
    parcels += target.feed(packet)
  return parcels


@contextlib.contextmanager
def taken(stream):
  """A queue of the frames in each packet, which a thread takes as gRPC does."""
  packets = queue.Queue()

  def take():
    for packet in stream.packets():
      packets.put([frame for frame, _ in decode_packet(packet)])

  thread = threading.Thread(target=take)
  thread.start()
  try:
    yield packets
  finally:
    stream.fail('over')
    thread.join()


def test_what_is_sent_arrives():
  near, far = new_stream(), new_stream()
  assert near.send_or_drop(receipt(0), b'abc') == ()
  assert near.send_or_refuse(CONTROL, b'')
  control, bulk = carry(near, far)
  assert control.message == CONTROL
  assert (bulk.message, bulk.payload) == (receipt(0), b'abc')
  assert near.bytes_sent == far.bytes_received
  assert near.bytes_sent == control.wire_bytes + bulk.wire_bytes


def test_a_small_payload_and_its_acknowledgement_cost_no_more_packets():
  near, far = new_stream(options=SLOW), new_stream(options=SLOW)
  with taken(far) as packets:
    near.send_or_drop(receipt(0), b'abc')
    packet = near.next_packet()
    assert packet is not None
    assert near.next_packet() is None
    (parcel,) = far.feed(packet)
    assert parcel.wire_bytes == near.bytes_sent == far.bytes_received
    far.settle(parcel)
    # Not before there is something else to be sent.
    far.send_or_drop(CONTROL, b'')
    frames = packets.get(timeout=DEADLINE_SECONDS)
    assert frames == [AcknowledgementFrame(3), EnvelopeFrame(CONTROL)]


def test_an_acknowledgement_goes_alone_if_nothing_else_does():
  clock = Clock()
  near, far = new_stream(clock, options=FAST), new_stream(options=FAST)
  with taken(far) as packets:
    for round_ in range(50):
      near.send_or_drop(receipt(round_), b'abc')
      (parcel,) = carry(near, far)
      far.settle(parcel)
      (frame,) = packets.get(timeout=DEADLINE_SECONDS)
      assert frame == AcknowledgementFrame(3 * (round_ + 1))
      near.feed(encode_frame(frame))
      if round_ % 10 == 0:
        # Whoever takes packets may sleep soundly by now, or not.
        threading.Event().wait(0.005)
  # So that silence is no stall.
  clock.now = 1e6
  assert near.send_or_drop(CONTROL, b'') == ()
  near.fail('lost')
  assert near.dropped == ()


def test_what_was_taken_in_but_not_acknowledged_counts_as_dropped():
  near, far = new_stream(options=SLOW), new_stream(options=SLOW)
  with taken(far):
    near.send_or_drop(receipt(0), b'abc')
    (parcel,) = carry(near, far)
    far.settle(parcel)
    near.fail('lost')
  assert near.dropped == (receipt(0),)


def test_acknowledgements_of_chunks_do_not_wait():
  options = dataclasses.replace(SLOW, chunk_bytes=1000, window_bytes=2000)
  near, far = new_stream(options=options), new_stream(options=options)
  near.send_or_drop(receipt(0), bytes(10_000))
  with taken(far) as packets:
    # Two chunks at a time, or one.
    while not (parcels := carry(near, far)):
      (frame,) = packets.get(timeout=DEADLINE_SECONDS)
      near.feed(encode_frame(frame))
  assert parcels[0].payload == bytes(10_000)


def test_the_last_words_have_a_packet_of_their_own():
  # Whoever is told of the end hands nothing out any more.
  near, far = new_stream(options=SLOW), new_stream(options=SLOW)
  near.send_or_drop(CONTROL, b'')
  near.finish('done')
  packet = near.next_packet()
  assert packet is not None
  assert [parcel.message for parcel in far.feed(packet)] == [CONTROL]
  assert not far.is_ending
  carry(near, far)
  assert far.reason == 'done'


def test_credit_comes_back_when_a_parcel_is_settled():
  near, far = new_stream(), new_stream(receive_queue=1)
  near.send_or_drop(receipt(0), b'12345678')
  near.send_or_drop(receipt(1), b'abcdefgh')
  (first,) = carry(near, far)
  # All 8 bytes of the window are taken in, but the parcel is not looked at; the
  # first chunk was acknowledged when it came, so one more chunk may follow.
  carry(far, near)
  assert carry(near, far) == []
  carry(far, near)
  assert near.next_packet() is None
  far.settle(first)
  carry(far, near)
  (second,) = carry(near, far)
  assert second.payload == b'abcdefgh'


def test_too_many_control_messages_end_it():
  ends = []
  stream = FrameStream(
    OPTIONS, Clock(), bulk_queue=1, receive_queue=1, on_end=ends.append
  )
  stream.send_or_drop(receipt(0), b'x')
  assert [stream.send_or_refuse(CONTROL, b'') for _ in range(3)] == [
    True,
    True,
    False,
  ]
  assert ends == [True]
  assert 'Too many control messages' in stream.reason
  assert stream.dropped == (receipt(0),)
  assert stream.send_or_drop(CONTROL, b'') == (CONTROL,)
  assert stream.next_packet() is None


def test_a_link_that_sends_too_many_is_told():
  stream = new_stream()
  assert [stream.send_or_drop(CONTROL, b'') for _ in range(3)] == [
    (),
    (),
    (CONTROL,),
  ]


@pytest.mark.parametrize('send', ['send_or_drop', 'send_or_refuse'])
def test_a_stall_is_noticed_by_whoever_sends(send):
  clock = Clock()
  stream = new_stream(clock)
  stream.send_or_drop(receipt(0), b'12345678')
  while stream.next_packet() is not None:
    pass
  clock.now = 49.0
  getattr(stream, send)(CONTROL, b'')
  assert not stream.is_ending
  clock.now = 50.0
  getattr(stream, send)(CONTROL, b'')
  assert stream.has_failed
  assert stream.dropped == (receipt(0),)


def test_a_stall_is_noticed_by_whoever_takes_packets():
  clock = Clock()
  stream = new_stream(clock)
  stream.send_or_drop(receipt(0), b'12345678')
  packets = stream.packets()
  # Envelope and two chunks, then 50 seconds of nothing.
  assert len([next(packets) for _ in range(3)]) == 3
  clock.now = 50.0
  assert list(packets) == []
  assert 'took no payload bytes for 50.0 s' in stream.reason


def test_finishing_sends_control_and_why():
  near, far = new_stream(), new_stream()
  near.send_or_drop(receipt(0), b'abc')
  near.send_or_drop(CONTROL, b'')
  near.finish('done')
  near.finish('another reason')
  assert near.dropped == (receipt(0),)
  (parcel,) = carry(near, far)
  assert parcel.message == CONTROL
  assert (near.reason, far.reason) == ('done', 'done')
  assert far.is_ending
  assert list(near.packets()) == []


def test_failing_sends_nothing():
  stream = new_stream()
  stream.send_or_drop(CONTROL, b'')
  stream.fail('lost')
  assert stream.next_packet() is None
  assert list(stream.packets()) == []
  assert stream.reason == 'lost'


def test_a_reason_without_end_is_cut():
  near, far = new_stream(), new_stream()
  near.finish('x' * 10_000_000)
  carry(near, far)
  assert far.reason == 'x' * 1000
  # Nor is one kept that somebody else has sent.
  far = new_stream()
  far.feed(encode_frame(ClosingFrame('x' * 1_000_000)))
  assert far.reason == 'x' * 1000


def test_nonsense_is_a_wire_error():
  with pytest.raises(WireError):
    new_stream().feed(b'\xff')


def test_a_packet_of_very_many_messages_is_taken_in():
  # With work that grows as the square of their number, this would take ten
  # minutes, and keep all other connections waiting.
  packet = encode_frame(EnvelopeFrame(CONTROL))
  number = MAX_PACKET_BYTES // len(packet)
  parcels = new_stream().feed(number * packet)
  assert len(parcels) == number > 500_000
