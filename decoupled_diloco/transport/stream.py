"""One side of one connection, for whatever carries its packets."""

import threading
from collections.abc import Callable, Iterator, Sequence

from decoupled_diloco.protocol.messages import Message
from decoupled_diloco.transport.base import Parcel, Payload
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.reassembler import Reassembler
from decoupled_diloco.transport.scheduler import FrameScheduler, Piece
from decoupled_diloco.transport.wire import (
  AcknowledgementFrame,
  ClosingFrame,
  EnvelopeFrame,
  decode_packet,
  encode_frame,
)

# gRPC puts a flag and a length before each message.
_GRPC_PREFIX_BYTES = 5
_MAX_REASON_LENGTH = 1000

# Why a stream ended, where nobody has said so.
LOST = 'The connection was lost.'
CLOSED_BY_LEARNER = 'The learner has closed the connection.'
CLOSED_BY_SYNCER = 'The syncer has closed the connection.'


class FrameStream:
  """Both directions of a connection, shared by the threads that use it.

  Any thread may send. One thread takes the packets to send, and one feeds those
  that come in and settles the parcels that they make.

  It ends once: softly with `finish` (what is control is still sent, and why it
  ends), or at once with `fail`. The first reason stands, on both sides.

  Args:
    options: sizes and timeouts.
    clock: the time in seconds.
    bulk_queue: payloads waiting to be sent, at most.
    receive_queue: payloads handed out but not settled, before the other side is
      made to wait.
    on_end: called, without a lock, when the stream ends; with True when it does
      so at once, which may come after the first call.
    wait: waits for a condition, at most so many seconds of the clock if that is
      not None; returns False if they are over.
  """

  def __init__(
    self,
    options: TransportOptions,
    clock: Callable[[], float],
    *,
    bulk_queue: int,
    receive_queue: int,
    on_end: Callable[[bool], None] = lambda is_at_once: None,
    wait: Callable[
      [threading.Condition, float | None], bool
    ] = threading.Condition.wait,
  ):
    self._options = options
    self._clock = clock
    self._wait = wait
    self._receive_queue = receive_queue
    self._on_end = on_end
    self._changed = threading.Condition()
    self._scheduler = FrameScheduler(options, bulk_queue)
    self._reassembler = Reassembler(options)
    self._num_unsettled = 0
    self._acknowledged = 0
    # Whether whoever takes packets sleeps with no alarm for acknowledgements.
    self._is_idle = False
    self._is_finishing = False
    self._has_said_why = False
    self.has_failed = False
    self._dropped: tuple[Message, ...] = ()
    self.reason = ''
    self.bytes_sent = 0
    self.bytes_received = 0

  @property
  def is_ending(self) -> bool:
    """Whether nothing more should be handed out or queued."""
    return self._is_finishing or self.has_failed

  @property
  def num_unsent(self) -> int:
    """Payloads waiting to be sent."""
    return self._scheduler.num_unsent

  def send_or_drop(
    self, message: Message, payload: Payload
  ) -> tuple[Message, ...]:
    """Queues a message, in place of the oldest payload if there are too many.

    Returns:
      The messages that were dropped for it, or itself if the stream has ended.
    """
    frame = _check(message, payload, self._options)
    dropped = ()
    with self._changed:
      if self.is_ending:
        return (message,)
      if memoryview(payload).nbytes:
        if self._scheduler.is_bulk_full:
          dropped = (self._scheduler.drop_oldest(),)
        self._scheduler.queue_bulk(message, payload, len(frame))
        is_queued = True
      else:
        is_queued = self._scheduler.queue_control(frame)
      self._changed.notify_all()
      is_stalled = self._is_stalled()
    if not is_queued:
      self.fail('Too many control messages are waiting to be sent.')
      return (message,)
    if is_stalled:
      self._fail_stalled()
    return tuple(each for each in dropped if each is not None)

  def send_or_refuse(self, message: Message, payload: Payload) -> bool:
    """Queues a message; False if there are too many, or the stream has ended.

    Too many control messages end the stream.
    """
    frame = _check(message, payload, self._options)
    with self._changed:
      if self.is_ending:
        return False
      if memoryview(payload).nbytes:
        is_queued = self._scheduler.queue_bulk(message, payload, len(frame))
        has_overflown = False
      else:
        is_queued = self._scheduler.queue_control(frame)
        has_overflown = not is_queued
      self._changed.notify_all()
      is_stalled = self._is_stalled()
    if has_overflown:
      self.fail('Too many control messages are waiting to be sent.')
    elif is_stalled:
      self._fail_stalled()
    return is_queued and not is_stalled

  def packets(self) -> Iterator[bytes]:
    """The packets to send, as they become due, until the stream ends."""
    while frames := self._wait_for_frames():
      yield self._encode(frames)

  def next_packet(self) -> bytes | None:
    """The next packet to send, which waits for none; None if nothing is due."""
    with self._changed:
      if self.has_failed:
        return None
      frames = self._next_frames(may_be_bare=True)
    return self._encode(frames) if frames else None

  def feed(self, data: bytes) -> tuple[Parcel, ...]:
    """Takes in a packet; returns the parcels to hand out, and then to settle.

    Raises:
      WireError: if it is no packet that may come now; nothing may follow it.
    """
    self.bytes_received += len(data) + _GRPC_PREFIX_BYTES
    prefix_bytes = _GRPC_PREFIX_BYTES
    # A list, for a packet may hold hundreds of thousands of messages.
    parcels: list[Parcel] = []
    for frame, num_bytes in decode_packet(data):
      if isinstance(frame, ClosingFrame):
        self.finish(frame.reason[:_MAX_REASON_LENGTH])
      elif isinstance(frame, AcknowledgementFrame):
        self._on_acknowledged(frame.received_bytes)
      else:
        parcels.extend(self._reassembler.feed(frame, num_bytes + prefix_bytes))
        prefix_bytes = 0
    with self._changed:
      self._num_unsettled += sum(map(_has_payload, parcels))
      self._acknowledge()
    return tuple(parcels)

  def settle(self, parcel: Parcel):
    """A parcel has been looked at: there is room for another."""
    if _has_payload(parcel):
      with self._changed:
        self._num_unsettled -= 1
        self._acknowledge()

  def finish(self, reason: str):
    """Ends the stream when what is queued of control has been sent."""
    with self._changed:
      if self.is_ending:
        return
      self.reason = reason
      self._is_finishing = True
      self._dropped = self._scheduler.drop_bulk()
      self._changed.notify_all()
    self._on_end(False)

  def fail(self, reason: str):
    """Ends the stream at once."""
    with self._changed:
      if self.has_failed:
        return
      if not self._is_finishing:
        self.reason = reason
        self._dropped = self._scheduler.drop_bulk()
      self.has_failed = True
      self._changed.notify_all()
    self._on_end(True)

  @property
  def dropped(self) -> tuple[Message, ...]:
    """What was not acknowledged when the stream ended."""
    return self._dropped

  def _on_acknowledged(self, received_bytes: int):
    with self._changed:
      self._scheduler.on_acknowledged(received_bytes, self._clock())
      if self._scheduler.has_bulk:  # It may have waited for that.
        self._changed.notify_all()

  def _acknowledge(self):
    received = self._reassembler.received_bytes
    if (
      received > self._acknowledged
      and self._num_unsettled < self._receive_queue
    ):
      self._acknowledged = received
      if self._scheduler.acknowledge(received) or self._is_idle:
        self._changed.notify_all()

  def _wait_for_frames(self) -> tuple[bytes | Piece, ...]:
    is_late = False
    with self._changed:
      while not self.has_failed and not self._is_stalled():
        frames = self._next_frames(may_be_bare=is_late)
        if frames or self._is_finishing:
          return frames
        is_late = not self._sleep(is_idle=is_late)
    self._fail_stalled()
    return ()

  def _sleep(self, *, is_idle: bool) -> bool:
    """Waits for something to send; False if the time for that is up.

    While packets come and go, it is up soon enough for acknowledgements, so
    that what comes in need not wake anybody for them. After such a time without
    any, it is not, until something does come in.
    """
    self._is_idle = is_idle
    now = self._clock()
    limits = [] if is_idle else [self._options.acknowledge_seconds]
    since = self._scheduler.window.waiting_since()
    if since is not None:
      limits.append(since + self._options.stall_seconds - now)
    due = self._scheduler.seconds_until_due(now)
    if due is not None:
      limits.append(due)
    try:
      return self._wait(self._changed, min(limits, default=None))
    finally:
      self._is_idle = False

  def _next_frames(self, *, may_be_bare: bool) -> tuple[bytes | Piece, ...]:
    frames = self._scheduler.next_packet(self._clock(), may_be_bare=may_be_bare)
    if not frames and self._is_finishing and not self._has_said_why:
      self._has_said_why = True
      closing = ClosingFrame(self.reason[:_MAX_REASON_LENGTH])
      return (encode_frame(closing),)
    return frames

  def _encode(self, frames: Sequence[bytes | Piece]) -> bytes:
    packet = b''.join(
      frame if isinstance(frame, bytes) else frame.encode() for frame in frames
    )
    self.bytes_sent += len(packet) + _GRPC_PREFIX_BYTES
    return packet

  def _is_stalled(self) -> bool:
    since = self._scheduler.window.waiting_since()
    return (
      since is not None and self._clock() - since >= self._options.stall_seconds
    )

  def _fail_stalled(self):
    self.fail(
      f'The other side took no payload bytes for {self._options.stall_seconds} '
      's, though some were on their way.'
    )


def _has_payload(parcel: Parcel) -> bool:
  return not parcel.is_intact or len(parcel.payload) > 0


def _check(
  message: Message, payload: Payload, options: TransportOptions
) -> bytes:
  """The message as a frame, if it and its payload may be sent."""
  size = memoryview(payload).nbytes
  if size > options.max_payload_bytes:
    raise ValueError(
      f'The payload of {message} has {size} bytes, which must not exceed '
      f'max_payload_bytes={options.max_payload_bytes}; use more fragments, or '
      'raise it on both sides.'
    )
  # As large as the envelope can become.
  frame = encode_frame(
    EnvelopeFrame(message, (1 << 64) - 1, size, (1 << 64) - 1)
    if size
    else EnvelopeFrame(message)
  )
  if len(frame) + _GRPC_PREFIX_BYTES > options.max_message_bytes:
    raise ValueError(
      f'A {type(message).__name__} of {len(frame)} bytes must not exceed '
      f'max_message_bytes={options.max_message_bytes}.'
    )
  return frame
