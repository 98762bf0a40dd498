"""Packets of frames as bytes, strictly: what is not understood is an error.

The conversion goes by names: a message class and its fields are called in
protocol/messages.py as in wire.proto.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints

from google.protobuf.message import DecodeError, EncodeError

from decoupled_diloco.protocol.messages import Message, Reason
from decoupled_diloco.transport import wire_pb2


class WireError(ValueError):
  """A peer sent what the rules of wire.proto do not allow."""


class EnvelopeFrame(NamedTuple):
  """A message; `payload_size` bytes are to follow if that is not 0."""

  message: Message
  payload_id: int = 0
  payload_size: int = 0
  payload_checksum: int = 0


class ChunkFrame(NamedTuple):
  """The next bytes of a payload."""

  payload_id: int
  data: bytes


class AcknowledgementFrame(NamedTuple):
  """How many bytes of chunks the other side has taken in."""

  received_bytes: int


class ClosingFrame(NamedTuple):
  """The last one: why the other side ends the connection."""

  reason: str


Frame: TypeAlias = (
  EnvelopeFrame | ChunkFrame | AcknowledgementFrame | ClosingFrame
)

_MESSAGES: Mapping[str, type] = {
  kind.__name__: kind for kind in get_args(Message)
}
# From a message class to its member of the envelope, and back.
_MEMBERS: Mapping[type, str] = {
  _MESSAGES[field.message_type.name]: field.name
  for field in wire_pb2.Envelope.DESCRIPTOR.oneofs_by_name['message'].fields
  if field.message_type is not None
}
_KINDS: Mapping[str, type] = {name: kind for kind, name in _MEMBERS.items()}


class ReceivedFrame(NamedTuple):
  """A frame that came in, and its share of the bytes of its packet."""

  frame: Frame
  num_bytes: int


def encode_frame(frame: Frame) -> bytes:
  """A frame as a packet.

  Packets joined are again a packet, of all their frames in that order.

  Raises:
    ValueError: if a field of the message has a value that cannot be sent.
  """
  packet = wire_pb2.Packet()
  wire = packet.frames.add()
  match frame:
    case ChunkFrame(payload_id, data):
      wire.chunk.payload_id = payload_id
      wire.chunk.data = data
    case AcknowledgementFrame(received_bytes):
      wire.acknowledgement.SetInParent()
      wire.acknowledgement.received_bytes = received_bytes
    case ClosingFrame(reason):
      wire.closing.SetInParent()
      wire.closing.reason = reason
    case EnvelopeFrame(message, payload_id, payload_size, payload_checksum):
      values = _plain_fields(message)
      try:
        envelope = wire_pb2.Envelope(
          payload_id=payload_id,
          payload_size=payload_size,
          payload_checksum=payload_checksum,
          **{_MEMBERS[type(message)]: values},
        )
        wire.envelope.CopyFrom(envelope)
      except (TypeError, ValueError, EncodeError) as error:
        raise ValueError(f'{message} cannot be sent: {error}') from error
  return packet.SerializeToString()


def decode_packet(data: bytes) -> list[ReceivedFrame]:
  """The frames of a packet: the inverse of `encode_frame`, for any number.

  Raises:
    WireError: if the bytes are no packet, or one with a frame of a kind, or of
      a value, that is not ours.
  """
  packet = wire_pb2.Packet()
  try:
    packet.ParseFromString(data)
  except DecodeError as error:
    raise WireError(f'{len(data)} bytes are no packet: {error}') from None
  if not packet.frames:
    raise WireError(f'A packet of {len(data)} bytes has no frames.')
  if len(packet.frames) == 1:
    return [ReceivedFrame(_frame(packet.frames[0]), len(data))]
  return [
    ReceivedFrame(_frame(frame), _num_bytes(frame)) for frame in packet.frames
  ]


def _num_bytes(frame: wire_pb2.Frame) -> int:
  """What a frame takes in a packet: a tag, its size in base 128, and itself."""
  size = frame.ByteSize()
  return 1 + max(1, math.ceil(size.bit_length() / 7)) + size


def _frame(frame: wire_pb2.Frame) -> Frame:
  match frame.WhichOneof('frame'):
    case 'chunk':
      return ChunkFrame(frame.chunk.payload_id, frame.chunk.data)
    case 'acknowledgement':
      return AcknowledgementFrame(frame.acknowledgement.received_bytes)
    case 'closing':
      return ClosingFrame(frame.closing.reason)
    case 'envelope':
      envelope = frame.envelope
      member = envelope.WhichOneof('message')
      if member is None:
        raise WireError('An envelope holds no message of this version.')
      return EnvelopeFrame(
        _message(_KINDS[member], getattr(envelope, member)),
        envelope.payload_id,
        envelope.payload_size,
        envelope.payload_checksum,
      )
    case _:
      raise WireError('A frame is of no kind of this version.')


def _plain_fields(message: Message) -> dict[str, Any]:
  """The fields that are set; None stands for a field that is not."""
  values = {}
  for field in dataclasses.fields(message):
    value = getattr(message, field.name)
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(
        f'{type(message).__name__}.{field.name}={value} must be finite; '
        'where it may be None, that says so.'
      )
    if value is not None:
      values[field.name] = value
  return values


def _message(kind: type, fields: Any) -> Message:
  values = {}
  for name, convert in _CONVERTERS[kind].items():
    if fields.DESCRIPTOR.fields_by_name[name].has_presence:
      value = getattr(fields, name) if fields.HasField(name) else None
    else:
      value = getattr(fields, name)
    try:
      values[name] = convert(value)
    except ValueError as error:
      raise WireError(f'{kind.__name__}.{name}: {error}') from None
  return kind(**values)


def _as_it_is(value: Any) -> Any:
  return value


def _finite(value: float | None) -> float | None:
  if value is not None and not math.isfinite(value):
    raise ValueError(f'{value} must be finite.')
  return value


def _converter(hint: Any) -> Callable[[Any], Any]:
  """From what protobuf gives to what a field of this type holds."""
  if hint is Reason:
    return Reason
  if getattr(hint, '__origin__', None) is tuple:
    return tuple
  return _finite if float in (hint, *get_args(hint)) else _as_it_is


_CONVERTERS: Mapping[type, Mapping[str, Callable[[Any], Any]]] = {
  kind: {name: _converter(hint) for name, hint in get_type_hints(kind).items()}
  for kind in _MESSAGES.values()
}
