"""Which frames go next: acknowledgements, control, then payloads in chunks."""

import collections
import dataclasses

import xxhash

from decoupled_diloco.protocol.messages import Message
from decoupled_diloco.transport.base import Payload
from decoupled_diloco.transport.options import (
  CHUNK_OVERHEAD_BYTES,
  TransportOptions,
)
from decoupled_diloco.transport.shaping import Shaper
from decoupled_diloco.transport.window import CreditWindow
from decoupled_diloco.transport.wire import (
  AcknowledgementFrame,
  ChunkFrame,
  EnvelopeFrame,
  encode_frame,
)


@dataclasses.dataclass(eq=False, slots=True)
class _Bulk:
  message: Message
  payload: memoryview
  envelope_bytes: int
  payload_id: int = 0
  sent: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
  """A frame of a payload, not encoded yet: that takes time, and no lock."""

  message: Message
  payload: memoryview
  payload_id: int
  start: int | None
  stop: int

  def encode(self) -> bytes:
    """The frame: of the envelope if `start` is None, else of a chunk."""
    if self.start is None:
      return encode_frame(
        EnvelopeFrame(
          self.message,
          self.payload_id,
          self.payload.nbytes,
          xxhash.xxh3_64_intdigest(self.payload),
        )
      )
    data = bytes(self.payload[self.start : self.stop])
    return encode_frame(ChunkFrame(self.payload_id, data))


class FrameScheduler:
  """The outgoing direction of one connection, as a queue of frames.

  Control messages wait only for chunks that are on their way. Of the payloads,
  one is sent at a time, in chunks as far as the credit window allows. None is
  begun before the window has room for its first chunk, so what cannot be sent
  can still be dropped. What is small and due travels in one packet. Payloads
  keep to the cap of the options, which control messages do not wait for.
  """

  def __init__(self, options: TransportOptions, bulk_queue: int):
    self._options = options
    self._bulk_queue = bulk_queue
    self._control: collections.deque[bytes] = collections.deque()
    self._unsent: collections.deque[_Bulk] = collections.deque()
    self._current: _Bulk | None = None
    # (bytes sent up to the end of a payload, its message)
    self._unacknowledged: collections.deque[tuple[int, Message]] = (
      collections.deque()
    )
    self._received = 0
    self._acknowledged = 0
    self._last_id = 0
    self._shaper = Shaper(options.max_bytes_per_second, options.chunk_bytes)
    self.window = CreditWindow(
      options.chunk_bytes, options.window_bytes, options.bulk_delay_seconds
    )

  @property
  def num_unsent(self) -> int:
    """Payloads waiting, without the one that is being sent."""
    return len(self._unsent)

  @property
  def has_bulk(self) -> bool:
    """Whether there is any of a payload to be sent, now or later."""
    return self._current is not None or bool(self._unsent)

  @property
  def is_bulk_full(self) -> bool:
    """Whether the queue of payloads has no room."""
    return len(self._unsent) >= self._bulk_queue

  def queue_control(self, frame: bytes) -> bool:
    """Queues an encoded message; False if too many are queued."""
    if len(self._control) >= self._options.control_queue:
      return False
    self._control.append(frame)
    return True

  def queue_bulk(
    self, message: Message, payload: Payload, envelope_bytes: int
  ) -> bool:
    """Queues a message with a payload; False if too many are queued.

    Args:
      message: the message.
      payload: the payload.
      envelope_bytes: what the message takes at most as a frame.
    """
    if self.is_bulk_full:
      return False
    view = memoryview(payload).cast('B').toreadonly()
    self._unsent.append(_Bulk(message, view, envelope_bytes))
    return True

  def drop_oldest(self) -> Message | None:
    """Drops the oldest payload that is not begun; returns its message."""
    return self._unsent.popleft().message if self._unsent else None

  def drop_bulk(self) -> tuple[Message, ...]:
    """Drops all payloads; returns what is not acknowledged in full."""
    messages = [message for _, message in self._unacknowledged]
    if self._current:
      messages.append(self._current.message)
    messages.extend(bulk.message for bulk in self._unsent)
    self._unacknowledged.clear()
    self._current = None
    self._unsent.clear()
    return tuple(messages)

  def acknowledge(self, received_bytes: int) -> bool:
    """Lets the other side know how many bytes are taken in.

    Returns:
      Whether that may not wait for a packet to travel in. The other side's
      window holds two chunks at least, so with less than one unacknowledged it
      has room for another, and nothing waits for this.
    """
    self._received = received_bytes
    return self._is_urgent

  def on_acknowledged(self, received_bytes: int, now: float):
    """The other side lets us know how many bytes it has taken in.

    Raises:
      WireError: if it cannot have.
    """
    self.window.on_acknowledged(received_bytes, now)
    while self._unacknowledged and self._unacknowledged[0][0] <= received_bytes:
      self._unacknowledged.popleft()

  def next_packet(
    self, now: float, *, may_be_bare: bool
  ) -> tuple[bytes | Piece, ...]:
    """The frames that go next, in one packet; none while none may go.

    Args:
      now: the time.
      may_be_bare: whether an acknowledgement that is not urgent may go without
        other frames.
    """
    frames: list[bytes | Piece] = []
    room = self._options.packet_bytes
    while (size := self._next_size(now)) and (size <= room or not frames):
      room -= size
      frames.append(self._next_frame(now))
    if self._received > self._acknowledged and (
      frames or may_be_bare or self._is_urgent
    ):
      self._acknowledged = self._received
      frames.insert(0, encode_frame(AcknowledgementFrame(self._acknowledged)))
    return tuple(frames)

  @property
  def _is_urgent(self) -> bool:
    return self._received - self._acknowledged >= self._options.chunk_bytes

  def seconds_until_due(self, now: float) -> float | None:
    """How long payload bytes only wait for the cap; None if they do not."""
    seconds = self._shaper.seconds_until_free(now)
    return seconds if seconds and self.has_bulk else None

  def _next_size(self, now: float) -> int:
    """At least the bytes of the frame that may go next; 0 if none may."""
    if self._control:
      return len(self._control[0])
    if self._current is None and not self._unsent:
      return 0
    bulk = self._current or self._unsent[0]
    size = self._chunk_size(bulk)
    if self._shaper.seconds_until_free(now) or not self.window.has_room(size):
      return 0
    if self._current is None:
      return bulk.envelope_bytes
    return size + CHUNK_OVERHEAD_BYTES

  def _next_frame(self, now: float) -> bytes | Piece:
    if self._control:
      return self._control.popleft()
    if self._current is None:
      return self._begin(self._unsent.popleft())
    return self._continue(self._current, now)

  def _chunk_size(self, bulk: _Bulk) -> int:
    return min(self._shaper.chunk_bytes, bulk.payload.nbytes - bulk.sent)

  def _begin(self, bulk: _Bulk) -> Piece:
    self._current = bulk
    self._last_id += 1
    bulk.payload_id = self._last_id
    return Piece(bulk.message, bulk.payload, bulk.payload_id, None, 0)

  def _continue(self, bulk: _Bulk, now: float) -> Piece:
    size = self._chunk_size(bulk)
    start = bulk.sent
    bulk.sent += size
    self.window.on_sent(size, now)
    self._shaper.on_sent(size, now)
    if bulk.sent == bulk.payload.nbytes:
      self._unacknowledged.append((self.window.sent, bulk.message))
      self._current = None
    return Piece(bulk.message, bulk.payload, bulk.payload_id, start, bulk.sent)
