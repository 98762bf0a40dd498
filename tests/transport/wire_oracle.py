"""What must hold whatever bytes a peer sends, for tests and for fuzzing."""

import struct
from collections.abc import Iterator, Sequence

import xxhash

from decoupled_diloco.protocol.messages import Receipt, RoundOpened
from decoupled_diloco.transport.base import Parcel
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.stream import FrameStream
from decoupled_diloco.transport.wire import (
  AcknowledgementFrame,
  ChunkFrame,
  ClosingFrame,
  EnvelopeFrame,
  WireError,
  decode_packet,
  encode_frame,
)

OPTIONS = TransportOptions(
  chunk_bytes=64,
  window_bytes=128,
  max_payload_bytes=256,
  max_message_bytes=1024,
)
_LENGTH = struct.Struct('<H')


def take_in(packets: Sequence[bytes]) -> list[Parcel]:
  """The parcels that these packets make, in a connection of their own.

  Raises:
    AssertionError: if what comes of them is not what must come of them.
    Exception: anything but a WireError is a fault too.
  """
  stream = FrameStream(OPTIONS, lambda: 0.0, bulk_queue=1, receive_queue=1)
  parcels: list[Parcel] = []
  expected = _Expected()
  for packet in packets:
    try:
      made = stream.feed(packet)
    except WireError:
      break
    except ValueError as error:
      raise AssertionError(f'not a WireError: {error!r}') from error
    expected.check(packet, made)
    for parcel in made:
      stream.settle(parcel)
    parcels += made
    # Whatever an envelope announces, no more is held than has come.
    held = stream._reassembler._open
    if held is not None:
      assert len(held.data) <= sum(map(len, packets))
      assert len(held.data) < OPTIONS.max_payload_bytes
    if stream.is_ending:
      assert len(stream.reason) <= 1000
  return parcels


class _Expected:
  """A second reading of the frames, with all of a payload hashed at once."""

  def __init__(self):
    self._open: EnvelopeFrame | None = None
    self._data = b''

  def check(self, packet: bytes, made: Sequence[Parcel]):
    """Compares what was made of a packet with what its frames say."""
    outcomes = [
      outcome
      for frame, _ in decode_packet(packet)
      for outcome in self._outcomes(frame)
    ]
    assert [(p.message, p.payload, p.is_intact) for p in made] == outcomes

  def _outcomes(self, frame) -> Iterator[tuple]:
    match frame:
      case EnvelopeFrame(message, _, 0, _):
        yield message, b'', True
      case EnvelopeFrame():
        if self._open is not None:
          yield self._open.message, b'', False
        self._open, self._data = frame, b''
      case ChunkFrame(_, data):
        assert self._open is not None
        self._data += data
        if len(self._data) >= self._open.payload_size:
          is_intact = (
            len(self._data) == self._open.payload_size
            and xxhash.xxh3_64_intdigest(self._data)
            == self._open.payload_checksum
          )
          payload = self._data if is_intact else b''
          yield self._open.message, payload, is_intact
          self._open = None


def split(data: bytes) -> list[bytes]:
  """The packets in one string of bytes: each after its length, in 2 bytes."""
  packets = []
  while len(data) >= _LENGTH.size:
    (length,) = _LENGTH.unpack_from(data)
    data = data[_LENGTH.size :]
    packets.append(data[:length])
    data = data[length:]
  return packets


def join(packets: Sequence[bytes]) -> bytes:
  """The inverse of `split`."""
  return b''.join(_LENGTH.pack(len(packet)) + packet for packet in packets)


def conversation(payload: bytes, payload_id: int = 1) -> list[bytes]:
  """What a peer of ours might send: a payload, and a message between."""
  middle = len(payload) // 2
  checksum = xxhash.xxh3_64_intdigest(payload)
  message = Receipt(learner=0, incarnation=1, round=payload_id)
  return [
    encode_frame(EnvelopeFrame(message, payload_id, len(payload), checksum))
    + encode_frame(ChunkFrame(payload_id, payload[:middle])),
    encode_frame(EnvelopeFrame(RoundOpened(round=0, fragment=0))),
    encode_frame(AcknowledgementFrame(0)),
    encode_frame(ChunkFrame(payload_id, payload[middle:])),
    encode_frame(ClosingFrame('done')),
  ]
