"""One side of a connection, without anything that carries its frames."""

import pytest

from decoupled_diloco.protocol.messages import Receipt, RoundOpened
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.stream import FrameStream
from decoupled_diloco.transport.wire import WireError

OPTIONS = TransportOptions(
  chunk_bytes=4, window_bytes=8, control_queue=2, stall_seconds=50.0
)
CONTROL = RoundOpened(round=0, fragment=0)


def receipt(round_):
  return Receipt(learner=0, incarnation=1, round=round_)


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


def new_stream(clock=None, bulk_queue=2, receive_queue=1):
  return FrameStream(
    OPTIONS,
    clock or Clock(),
    bulk_queue=bulk_queue,
    receive_queue=receive_queue,
  )


def carry(source, target):
  """Moves all frames that are due; returns the parcels they make."""
  parcels = []
  while (frame := source.next_frame()) is not None:
    parcels += target.feed(frame)
  return parcels


def test_what_is_sent_arrives():
  near, far = new_stream(), new_stream()
  assert near.send_or_drop(receipt(0), b'abc') == ()
  assert near.send_or_refuse(CONTROL, b'')
  control, bulk = carry(near, far)
  assert control.message == CONTROL
  assert (bulk.message, bulk.payload) == (receipt(0), b'abc')
  assert near.bytes_sent == far.bytes_received
  assert near.bytes_sent == control.wire_bytes + bulk.wire_bytes


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
  assert near.next_frame() is None
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
  assert stream.next_frame() is None


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
  while stream.next_frame() is not None:
    pass
  clock.now = 49.0
  getattr(stream, send)(CONTROL, b'')
  assert not stream.is_ending
  clock.now = 50.0
  getattr(stream, send)(CONTROL, b'')
  assert stream.has_failed
  assert stream.dropped == (receipt(0),)


def test_a_stall_is_noticed_by_whoever_takes_frames():
  clock = Clock()
  stream = new_stream(clock)
  stream.send_or_drop(receipt(0), b'12345678')
  frames = stream.frames()
  # Envelope and two chunks, then 50 seconds of nothing.
  assert len([next(frames) for _ in range(3)]) == 3
  clock.now = 50.0
  assert list(frames) == []
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
  assert list(near.frames()) == []


def test_failing_sends_nothing():
  stream = new_stream()
  stream.send_or_drop(CONTROL, b'')
  stream.fail('lost')
  assert stream.next_frame() is None
  assert list(stream.frames()) == []
  assert stream.reason == 'lost'


def test_a_reason_without_end_is_cut():
  near, far = new_stream(), new_stream()
  near.finish('x' * 10_000_000)
  carry(near, far)
  assert far.reason == 'x' * 1000


def test_nonsense_is_a_wire_error():
  with pytest.raises(WireError):
    new_stream().feed(b'\xff')
