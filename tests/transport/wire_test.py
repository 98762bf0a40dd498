"""Packets: every message there and back, and nothing else gets in."""

import contextlib
import dataclasses
import importlib
import math
import pathlib
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
