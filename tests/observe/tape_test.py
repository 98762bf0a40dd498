"""The event tape: written, read, followed, torn and damaged."""

import math
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.observe.tape import (
  TapeHeader,
  TapeWriter,
  follow,
  read_tape,
)
from decoupled_diloco.observe.tape_lines import LineParser, group_bytes
from decoupled_diloco.protocol.effects import Notice, WakeAt
from decoupled_diloco.protocol.events import TimePassed
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.machine import replay
from decoupled_diloco.protocol.syncer import syncer_machine

HEADER = TapeHeader('syncer', {'run_id': 'r'}, (3, 4), {'codec': 'int4'})
STEPS = [
  (TimePassed(1.0), ()),
  (TimePassed(2.5), (Notice('two\nlines \n'), WakeAt(0.1 + 0.2))),
  (TimePassed(3.0), (WakeAt(4.0),)),
]


def _write(path: pathlib.Path, header=HEADER, steps=STEPS) -> TapeWriter:
  writer = TapeWriter(path, header)
  for event, effects in steps:
    writer.record(event, effects)
  writer.close()
  return writer


def test_what_is_written_is_read(tmp_path):
  _write(tmp_path / 'tape')
  tape = read_tape(tmp_path / 'tape')
  assert tape.torn is None
  assert tape.steps == tuple(STEPS)
  assert tape.segments[0].header == HEADER


def test_a_tape_of_the_real_machine_can_be_replayed(tmp_path, tiny_run):
  run = tiny_run(rounds=5)
  _write(tmp_path / 'tape', run.header, run.steps)
  tape = read_tape(tmp_path / 'tape')
  assert tape.steps == tuple(run.steps)
  machine = syncer_machine(run.options)
  assert replay(machine, tape.steps) == len(run.steps)


def test_every_event_is_in_the_file_at_once(tmp_path):
  path = tmp_path / 'tape'
  writer = TapeWriter(path, HEADER)
  for count, (event, effects) in enumerate(STEPS):
    assert len(read_tape(path).steps) == count
    writer.record(event, effects)
  writer.close()


def test_a_restarted_process_begins_a_segment(tmp_path):
  path = tmp_path / 'tape'
  _write(path)
  with path.open('ab') as file:
    file.write(group_bytes(*STEPS[1])[:-20])
  writer = _write(path, TapeHeader('syncer', {}, ()), STEPS[:1])
  assert writer.cut_bytes == len(group_bytes(*STEPS[1])) - 20
  tape = read_tape(path)
  assert tape.torn is None
  assert [len(segment.steps) for segment in tape.segments] == [3, 1]
  assert tape.segments[1].header.options == {}


def test_a_tape_torn_anywhere_loses_only_the_last_event(tmp_path):
  _write(tmp_path / 'tape')
  data = (tmp_path / 'tape').read_bytes()
  starts = [data.index(group_bytes(*step)) for step in STEPS]
  ends = [*starts[1:], len(data)]
  torn_path = tmp_path / 'torn'
  for size in range(len(data)):
    torn_path.write_bytes(data[:size])
    if size < starts[0]:
      with pytest.raises(ValueError, match='holds no whole header'):
        read_tape(torn_path)
    else:
      tape = read_tape(torn_path)
      count = sum(end <= size for end in ends)
      assert tape.steps == tuple(STEPS[:count])
      is_whole = size in (starts[0], *ends)
      assert (tape.torn is None) == is_whole
      if tape.torn:
        assert 'torn' in tape.torn and 'left out' in tape.torn
    # And the next writer goes on where it was whole.
    _write(torn_path, HEADER, STEPS[2:])
    assert read_tape(torn_path).steps[-1] == STEPS[2]


@given(st.data())
def test_a_follower_sees_every_event_once_however_it_is_cut(data):
  lines = HEADER.to_json().encode() + b' \n'
  tape = lines + b''.join(group_bytes(*step) for step in STEPS)
  tape += lines + group_bytes(*STEPS[0])
  cuts = data.draw(st.lists(st.integers(0, len(tape)), max_size=8))
  parser, items, rest, last = LineParser('tape'), [], b'', 0
  for cut in [*sorted(cuts), len(tape)]:
    rest, last = rest + tape[last:cut], cut
    found, size = parser.parse(rest)
    items, rest = items + found, rest[size:]
  assert items == [HEADER, *STEPS, HEADER, STEPS[0]]
  assert rest == b''


def test_follow_while_it_is_written(tmp_path):
  path = tmp_path / 'tape'
  follower = follow(path)
  assert follower.poll() == [] and follower.header is None
  writer = TapeWriter(path, HEADER)
  assert follower.poll() == [] and follower.header == HEADER
  writer.record(*STEPS[0])
  writer.record(*STEPS[1])
  assert follower.poll() == STEPS[:2]
  writer.close()
  with path.open('ab') as file:
    file.write(group_bytes(*STEPS[2])[:-4])
  assert follower.poll() == []
  assert follower.torn and 'line 6' in follower.torn
  # The next process cuts that off and begins a segment.
  other = TapeHeader('syncer', {'run_id': 'r', 'again': True}, (3, 4))
  _write(path, other, STEPS[:1])
  _write(path, HEADER, STEPS[1:2])
  # Events of two segments never come together.
  assert follower.poll() == STEPS[:1]
  assert (follower.segment, follower.header) == (1, other)
  assert follower.poll() == STEPS[1:2]
  assert (follower.segment, follower.header) == (2, HEADER)
  assert follower.poll() == [] and follower.torn is None


def test_follow_reads_in_pieces(tmp_path):
  path = tmp_path / 'tape'
  _write(path)
  follower = follow(path)
  seen = []
  while steps := follower.poll(max_bytes=200):
    seen += steps
  assert seen == STEPS


def test_a_replaced_tape_is_noticed(tmp_path):
  path = tmp_path / 'tape'
  _write(path)
  follower = follow(path)
  follower.poll()
  path.unlink()
  _write(path, HEADER, [])
  with pytest.raises(ValueError, match='has shrunk'):
    follower.poll()


@pytest.mark.parametrize(
  ('line', 'what'),
  [
    (b'{"type":"TimePassed","now":1.0', 'line 2: Expecting'),
    (b'[1]', 'line 2: list instead of a JSON object'),
    (b'{"type":"Nonsense"}', "line 2: 'Nonsense' is no record"),
    (b'{"type":"TimePassed"}', 'line 2: TimePassed with members'),
    (b'{"type":"RunEnded","reason":"x"}', 'line 2: RunEnded is neither'),
    (b'{"type":"WakeAt","at":1.0}', 'line 2: an effect without an event'),
    (b'{"type":"TapeHeader","format":9}', 'line 2: tape format 9 is not 1'),
    (b'{"type":"TapeHeader","format":1}', "line 2: member 'fragment_sizes'"),
  ],
)
def test_damage_names_the_file_the_line_and_the_rescue(tmp_path, line, what):
  path = tmp_path / 'tape'
  _write(path, HEADER, STEPS[:1])
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b''.join([lines[0], line + b' \n', *lines[1:]]))
  with pytest.raises(ValueError, match='head -n 1') as error:
    read_tape(path)
  assert str(error.value).startswith(f'{path}, {what}')
  with pytest.raises(ValueError, match='head -n 1'):
    follow(path).poll()


def test_an_event_before_any_header_is_damage(tmp_path):
  path = tmp_path / 'tape'
  path.write_bytes(group_bytes(*STEPS[0]))
  with pytest.raises(ValueError, match='an event before any header'):
    read_tape(path)


def test_spaces_that_an_editor_took_away_are_not_missed_inside(tmp_path):
  path = tmp_path / 'tape'
  _write(path)
  path.write_bytes(path.read_bytes().replace(b'} \n', b'}\n')[:-1] + b' \n')
  assert read_tape(path).steps == tuple(STEPS)


def test_a_header_takes_options_as_they_are(tmp_path):
  # DiLoCo waits for everybody, so an infinite grace is a possible option.
  header = TapeHeader.of('learner', GraceOptions(cap_seconds=math.inf), [1, 2])
  assert header.options['cap_seconds'] == 'inf'
  _write(tmp_path / 'tape', header, [])
  assert read_tape(tmp_path / 'tape').segments[0].header == header
  with pytest.raises(ValueError, match="must be 'syncer' or 'learner'"):
    TapeHeader('other', {}, ())  # pyright: ignore[reportArgumentType]
