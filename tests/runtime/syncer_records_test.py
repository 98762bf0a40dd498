"""What was written of a run is read again as it was."""

import json

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol.syncer_state import SyncerState
from decoupled_diloco.runtime.syncer_records import (
  Description,
  LifeRecord,
  MergeRecord,
  Progress,
  life_record,
  merge_record,
  read_record,
)
from decoupled_diloco.storage.journal import JournalError
from decoupled_diloco.training.global_model import Merged
from tests.protocol.scripts import SyncerScript

DELTA = (memoryview(b'abc'), memoryview(b''), memoryview(b'de'))
MERGED = Merged(b'payload', 1.5, DELTA)


def merging(round_: int = 0) -> tuple[SyncerState, fx.Merge]:
  """A machine that has just asked for a merge."""
  script = SyncerScript(M=2, P=2, H=2)
  for m in range(2):
    script.join(m)
  for done in range(round_):
    for m in range(2):
      script.contribute(m, done)
    script.done(done)
  for m in range(2):
    script.contribute(m, round_)
  (merge,) = script.merges_of(round_)
  return script.state, merge


@pytest.mark.parametrize('form', ['update', 'value'])
def test_a_merge(form):
  state, merge = merging(1)
  parts = merge_record(state, merge, MERGED, form)
  record = read_record(b''.join(parts), 7)
  assert isinstance(record, MergeRecord)
  assert (record.round, record.fragment) == (1, 1)
  assert record.state == state
  assert record.delta == b'abcde'
  assert record.payload == (b'payload' if form == 'update' else b'')


def test_a_start():
  assert read_record(life_record(3), 0) == LifeRecord(3)


@pytest.mark.parametrize(
  'record',
  [b'', b'\x02', b'\x02\0\0\0{', b'\x02\0\0\0[]', b'\x02\0\0\0\xff\xff'],
)
def test_what_is_no_record(record):
  with pytest.raises(JournalError, match='record 7 is whole, but was not'):
    read_record(record, 7)


def test_progress_keeps_what_the_machine_takes_for_unfinished():
  """The merges of `state` itself, and those that end at the same time."""
  state, _ = merging(0)
  later, _ = merging(1)
  assert 0 in state.rounds and 0 not in later.rounds
  progress = Progress(life=2).after_merge(state, 0)
  assert progress == Progress(2, state, (0,))
  assert progress.after_merge(later, 1) == Progress(2, later, (1,))


@pytest.mark.parametrize('has_merged', [False, True])
def test_a_description(has_merged):
  progress = Progress(life=2)
  if has_merged:
    progress = progress.after_merge(merging()[0], 0)
  description = Description('run', 12.5, 'layout', progress)
  written = json.dumps(description.to_jsonable())
  assert Description.from_jsonable(json.loads(written)) == description
