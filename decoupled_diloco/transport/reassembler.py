"""What comes of the frames that arrive."""

import dataclasses

import xxhash

from decoupled_diloco.transport.base import Parcel
from decoupled_diloco.transport.options import (
  MAX_PACKET_BYTES,
  TransportOptions,
)
from decoupled_diloco.transport.wire import (
  ChunkFrame,
  EnvelopeFrame,
  WireError,
)


@dataclasses.dataclass(eq=False, slots=True)
class _Open:
  """A payload of which more is to come."""

  envelope: EnvelopeFrame
  wire_bytes: int
  data: bytearray = dataclasses.field(default_factory=bytearray)
  checksum: xxhash.xxh3_64 = dataclasses.field(default_factory=xxhash.xxh3_64)


class Reassembler:
  """The incoming direction of one connection, from frames to parcels.

  It holds one unfinished payload at most, and of that no more than has come,
  whatever its envelope announces. A payload that is cut off, too long or not
  what its checksum says becomes a parcel that is not intact; frames that no
  sender of ours would send are an error.
  """

  def __init__(self, options: TransportOptions):
    self._options = options
    self._open: _Open | None = None
    self.received_bytes = 0

  def feed(
    self, frame: EnvelopeFrame | ChunkFrame, wire_bytes: int
  ) -> tuple[Parcel, ...]:
    """Takes in a frame; returns the parcels that it completes, in order.

    Args:
      frame: the frame.
      wire_bytes: its size as received.

    Raises:
      WireError: if the frame is against the rules. Nothing may follow it.
    """
    if wire_bytes > MAX_PACKET_BYTES:
      raise WireError(
        f'A frame of {wire_bytes} bytes is larger than {MAX_PACKET_BYTES}.'
      )
    if isinstance(frame, ChunkFrame):
      return self._chunk(frame, wire_bytes)
    if wire_bytes > self._options.max_message_bytes:
      raise WireError(
        f'A message of {wire_bytes} bytes is larger than '
        f'max_message_bytes={self._options.max_message_bytes}.'
      )
    if not frame.payload_size:
      return (Parcel(frame.message, b'', True, wire_bytes),)
    if frame.payload_size > self._options.max_payload_bytes:
      raise WireError(
        f'A payload of {frame.payload_size} bytes is larger than '
        f'max_payload_bytes={self._options.max_payload_bytes}.'
      )
    cut_off = () if self._open is None else (_spoilt(self._open),)
    self._open = _Open(frame, wire_bytes)
    return cut_off

  def _chunk(self, chunk: ChunkFrame, wire_bytes: int) -> tuple[Parcel, ...]:
    if not chunk.data:
      raise WireError('A chunk is empty.')
    if self._open is None or self._open.envelope.payload_id != chunk.payload_id:
      raise WireError(f'A chunk is of payload {chunk.payload_id}, not on now.')
    # Counted even if it is of no use, because its sender has spent the credit.
    self.received_bytes += len(chunk.data)
    payload = self._open
    payload.wire_bytes += wire_bytes
    size = len(payload.data) + len(chunk.data)
    if size <= payload.envelope.payload_size:
      payload.data += chunk.data
      payload.checksum.update(chunk.data)
      if size < payload.envelope.payload_size:
        return ()
    self._open = None
    if (
      size > payload.envelope.payload_size
      or payload.checksum.intdigest() != payload.envelope.payload_checksum
    ):
      return (_spoilt(payload),)
    return (
      Parcel(
        payload.envelope.message,
        memoryview(payload.data).toreadonly(),
        True,
        payload.wire_bytes,
      ),
    )


def _spoilt(payload: _Open) -> Parcel:
  return Parcel(payload.envelope.message, b'', False, payload.wire_bytes)
