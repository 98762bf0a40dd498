"""Packets: every message there and back, and nothing else gets in."""

import contextlib
import dataclasses
import importlib
import math
import pathlib
import resource
from typing import get_args

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.protocol.messages import (
  DrainStarted,
  Heartbeat,
  Message,
  Reason,
  Receipt,
  Refusal,
)
from decoupled_diloco.transport import wire_pb2
from decoupled_diloco.transport.wire import (
  AcknowledgementFrame,
  ChunkFrame,
  ClosingFrame,
  EnvelopeFrame,
  Frame,
  WireError,
  decode_packet,
  encode_frame,
)
from tests.transport import wire_oracle

ROOT = pathlib.Path(__file__).parents[2]
PROTO = 'decoupled_diloco/transport/wire.proto'

st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(
  float, st.floats(allow_nan=False, allow_infinity=False)
)
st.register_type_strategy(str, st.text(st.characters(codec='utf-8')))
messages = st.one_of([st.from_type(kind) for kind in get_args(Message)])
uint64 = st.integers(0, 2**64 - 1)
frames = st.one_of(
  st.builds(EnvelopeFrame, messages, uint64, uint64, uint64),
  st.builds(ChunkFrame, uint64, st.binary()),
  st.builds(AcknowledgementFrame, uint64),
  st.builds(ClosingFrame),
)


@given(frames)
def test_every_frame_survives(frame):
  packet = encode_frame(frame)
  assert decode_packet(packet) == [(frame, len(packet))]


@given(st.lists(frames, min_size=1, max_size=5))
def test_joined_packets_are_a_packet_of_all_frames(several):
  packets = [encode_frame(frame) for frame in several]
  # Each frame has the share of the bytes that it would have alone.
  assert decode_packet(b''.join(packets)) == [
    (frame, len(packet)) for frame, packet in zip(several, packets, strict=True)
  ]


def test_sizes_of_frames_in_base_128():
  # A chunk of id 0 is its data with a tag and a size: 2 bytes up to 127, then
  # 3; the frame around it adds as much, and so does the packet.
  for size in (1, 120, 121, 122, 123, 124, 125, 126, 127, 128, 16_383, 16_384):
    packet = encode_frame(ChunkFrame(0, bytes(size)))
    (_, first), (_, second) = decode_packet(packet + packet)
    assert first == second == len(packet)


def test_none_is_not_zero():
  for loss in (None, 0.0):
    heartbeat = Heartbeat(
      learner=0,
      incarnation=1,
      activity='training',
      total_steps=0,
      total_tokens=0,
      tokens_per_second=0.0,
      loss=loss,
    )
    ((frame, _),) = decode_packet(encode_frame(EnvelopeFrame(heartbeat)))
    assert frame == EnvelopeFrame(heartbeat)


@given(st.binary())
def test_any_bytes_are_frames_or_a_wire_error(data):
  try:
    received = decode_packet(data)
  except WireError:
    return
  assert received
  assert all(isinstance(frame, get_args(Frame)) for frame, _ in received)


@given(frames, frames, st.data())
def test_any_damage_gives_other_frames_or_a_wire_error(first, second, data):
  encoded = bytearray(encode_frame(first) + encode_frame(second))
  if encoded:
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
  del encoded[data.draw(st.integers(0, len(encoded))) :]
  with contextlib.suppress(WireError):
    decode_packet(bytes(encoded))


def mutations(valid: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
  """These bytes with a few bytes changed, cut out or put in between."""

  @st.composite
  def mutate(draw):
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 4))):
      at = draw(st.integers(0, len(data)))
      removed = draw(st.integers(0, 8))
      data[at : at + removed] = draw(st.binary(max_size=8))
    return bytes(data)

  return mutate()


payloads = st.binary(min_size=2, max_size=100)
valid = payloads.map(wire_oracle.conversation)


@given(payloads)
def test_the_oracle_of_what_comes_of_packets(payload):
  packets = wire_oracle.conversation(payload)
  assert wire_oracle.split(wire_oracle.join(packets)) == packets
  parcels = wire_oracle.take_in(packets)
  assert [bytes(parcel.payload) for parcel in parcels] == [b'', payload]
  assert all(parcel.is_intact for parcel in parcels)


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_no_bytes_break_a_connection_but_by_a_wire_error(packets):
  wire_oracle.take_in(packets)


@given(mutations(valid.map(wire_oracle.join)))
def test_no_damage_breaks_a_connection_but_by_a_wire_error(data):
  wire_oracle.take_in(wire_oracle.split(data))


@given(st.lists(frames, max_size=10), st.data())
def test_no_frames_break_a_connection_but_by_a_wire_error(several, data):
  packets = [encode_frame(frame) for frame in several]
  places = data.draw(st.permutations(range(len(packets))))
  wire_oracle.take_in([packets[place] for place in places])


@given(payloads, st.data())
def test_a_payload_with_a_flipped_bit_is_never_believed(payload, data):
  packets = wire_oracle.conversation(payload)
  bit = data.draw(st.integers(0, 8 * len(payload) - 1))
  flipped = bytearray(payload)
  flipped[bit // 8] ^= 1 << bit % 8
  spoilt = wire_oracle.conversation(bytes(flipped))
  # The envelope of the one, and from there on the bytes of the other.
  (envelope, _), _ = decode_packet(packets[0])
  _, (chunk, _) = decode_packet(spoilt[0])
  parcels = wire_oracle.take_in(
    [encode_frame(envelope) + encode_frame(chunk), *spoilt[1:]]
  )
  assert [(p.payload, p.is_intact) for p in parcels] == [
    (b'', True),
    (b'', False),
  ]


def varint(number: int) -> bytes:
  """A number in base 128, as protobuf writes lengths."""
  digits = []
  while True:
    number, digit = number >> 7, number & 127
    digits.append(digit | 128 if number else digit)
    if not number:
      return bytes(digits)


@pytest.mark.parametrize('size', [1000, 2**31 - 1, 2**31, 2**40, 2**63])
@pytest.mark.parametrize('wrong', range(3))
def test_a_length_that_is_not_there_costs_nothing(size, wrong):
  # A frame in the packet, a chunk in the frame, and the data in the chunk.
  data = b'abc'
  for level, tag in reversed([*enumerate((b'\x0a', b'\x12', b'\x12'))]):
    data = tag + varint(size if level == wrong else len(data)) + data
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with pytest.raises(WireError, match='are no packet'):
    decode_packet(data)
  # In KiB. This is what protobuf takes, of which Python does not know.
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert peak < 64 << 10


@pytest.mark.parametrize(
  ('frame', 'match'),
  [
    (wire_pb2.Frame(), 'of no kind'),
    (wire_pb2.Frame(envelope=wire_pb2.Envelope()), 'no message'),
    (
      wire_pb2.Frame(
        envelope=wire_pb2.Envelope(refusal=wire_pb2.Refusal(reason='mood'))
      ),
      r"Refusal.reason: 'mood'",
    ),
    (
      wire_pb2.Frame(
        envelope=wire_pb2.Envelope(
          drain_started=wire_pb2.DrainStarted(seconds=math.inf)
        )
      ),
      'DrainStarted.seconds: inf must be finite',
    ),
  ],
)
def test_what_is_not_ours_is_a_wire_error(frame, match):
  with pytest.raises(WireError, match=match):
    decode_packet(wire_pb2.Packet(frames=[frame]).SerializeToString())


def test_an_empty_packet_is_a_wire_error():
  with pytest.raises(WireError, match='no frames'):
    decode_packet(b'')


@pytest.mark.parametrize(
  'message',
  [
    Receipt(learner=2**63, incarnation=0, round=0),
    Receipt(learner=0.5, incarnation=0, round=0),  # pyright: ignore
    DrainStarted(first_round=0, seconds=math.nan),
  ],
)
def test_what_cannot_be_sent_is_a_value_error(message):
  with pytest.raises(ValueError, match=type(message).__name__):
    encode_frame(EnvelopeFrame(message))


def test_messages_and_their_fields_are_called_alike():
  members = wire_pb2.Envelope.DESCRIPTOR.oneofs_by_name['message'].fields
  assert {m.message_type.name for m in members if m.message_type} == {
    kind.__name__ for kind in get_args(Message)
  }, 'wire.proto and protocol/messages.py differ in their messages.'
  for kind in get_args(Message):
    names = {field.name for field in dataclasses.fields(kind)}
    assert set(getattr(wire_pb2, kind.__name__).DESCRIPTOR.fields_by_name) == (
      names
    ), f'wire.proto and protocol/messages.py differ in {kind.__name__}.'


def test_reasons_are_strings_on_the_wire():
  refused = [f for f in dataclasses.fields(Refusal) if f.type is Reason]
  assert [f.name for f in refused] == ['reason']


def test_generated_code_is_that_of_the_proto_file(tmp_path):
  # Not grpc_tools.protoc by an import statement: it has no types.
  protoc = importlib.import_module('grpc_tools.protoc')
  descriptors = tmp_path / 'wire.pb'
  assert (
    protoc.main(
      ['protoc', f'-I{ROOT}', f'--descriptor_set_out={descriptors}', PROTO]
    )
    == 0
  )
  made = descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes())
  generated = descriptor_pb2.FileDescriptorProto()
  wire_pb2.DESCRIPTOR.CopyToProto(generated)
  for file in (*made.file, generated):
    file.ClearField('source_code_info')
    for message in file.message_type:
      for field in message.field:
        field.ClearField('json_name')
  assert list(made.file) == [generated], (
    'wire_pb2.py is older than wire.proto, which says how to make it.'
  )
