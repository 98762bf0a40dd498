"""What a syncer writes of a run besides arrays, and reads again.

Into its journal it writes a record for each of its starts and for each merge:

  record = length of the head, head (JSON); and of a merge its merged delta and
           what was published

Beside the arrays of a snapshot it writes how far the run had come by then, as
JSON.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol.records import from_jsonable, to_jsonable
from decoupled_diloco.protocol.syncer_state import SyncerState
from decoupled_diloco.storage.journal import JournalError
from decoupled_diloco.training.global_model import Merged

# Of all that is written here; every snapshot carries it.
FORMAT = 1
_HEAD = struct.Struct('<I')  # Length of the JSON that a record begins with.


class LifeRecord(NamedTuple):
  """A syncer was started: for the how-manieth time."""

  life: int


class MergeRecord(NamedTuple):
  """A merge was made.

  Attributes:
    round, fragment: which one.
    state: what the machine remembered when it began.
    delta: the bytes of `Merged.delta`.
    payload: of the publication; empty if it follows from the delta.
  """

  round: int
  fragment: int
  state: SyncerState
  delta: memoryview
  payload: memoryview


def life_record(life: int) -> bytes:
  """The bytes of a `LifeRecord`."""
  return _packed({'kind': 'life', 'life': life})


def merge_record(
  state: SyncerState, merge: fx.Merge, merged: Merged, form: str
) -> tuple[bytes | memoryview, ...]:
  """The bytes of a `MergeRecord`, in parts, without copies of the arrays.

  Args:
    state: what the machine remembered when the merge began.
    merge: what was merged.
    merged: what came of it.
    form: of publications, 'update' or 'value'.
  """
  head = {
    'kind': 'merge',
    'round': merge.round,
    'fragment': merge.fragment,
    'version': merge.version,
    'delta_bytes': sum(part.nbytes for part in merged.delta),
    'state': to_jsonable(state),
  }
  # Of a value, the payload follows from the delta.
  payload = merged.payload if form == 'update' else b''
  return _packed(head), *merged.delta, payload


def read_record(record: bytes, number: int) -> LifeRecord | MergeRecord:
  """Reads a record again.

  Args:
    record: its bytes.
    number: in the journal; for people.

  Raises:
    JournalError: if it is no record of this format.
  """
  try:
    (length,) = _HEAD.unpack_from(record)
    end = _HEAD.size + length
    head = json.loads(record[_HEAD.size : end])
    middle = end + head.get('delta_bytes', 0)
  except (struct.error, ValueError, AttributeError) as error:
    raise JournalError(
      f'record {number} is whole, but was not written by this version of '
      f'decoupled_diloco ({error}); continue with the one that wrote it.'
    ) from error
  if head['kind'] == 'life':
    return LifeRecord(head['life'])
  view = memoryview(record)
  return MergeRecord(
    head['round'],
    head['fragment'],
    _state_of(head['state']),
    view[end:middle],
    view[middle:],
  )


class Progress(NamedTuple):
  """What a snapshot and the records behind it amount to, arrays aside.

  Attributes:
    life: how often the syncer was started.
    state: what the machine remembered when the last merge began; None if there
      was none.
    merged: rounds whose merges had not ended then, and are durable.
  """

  life: int = 0
  state: SyncerState | None = None
  merged: tuple[int, ...] = ()

  def after_merge(self, state: SyncerState, round_: int) -> 'Progress':
    """Of the merges, those that `state` still takes for unfinished."""
    rounds = (*self.merged, round_)
    merged = tuple(number for number in rounds if number in state.rounds)
    return self._replace(state=state, merged=merged)


class Description(NamedTuple):
  """What a snapshot says besides its arrays.

  Attributes:
    run_id: name of the run.
    began_at: when it began, in seconds of Unix time.
    layout: digest of the fragments and the codecs.
    progress: how far it has come.
  """

  run_id: str
  began_at: float
  layout: str
  progress: Progress

  def to_jsonable(self) -> dict[str, Any]:
    """As JSON can have it."""
    life, state, merged = self.progress
    return {
      'format': FORMAT,
      'run_id': self.run_id,
      'began_at': self.began_at,
      'layout': self.layout,
      'life': life,
      'state': None if state is None else to_jsonable(state),
      'merged': list(merged),
    }

  @classmethod
  def from_jsonable(cls, value: Mapping[str, Any]) -> 'Description':
    """Inverts `to_jsonable`; of this `FORMAT`."""
    state = value['state']
    progress = Progress(
      value['life'],
      None if state is None else _state_of(state),
      tuple(value['merged']),
    )
    return cls(value['run_id'], value['began_at'], value['layout'], progress)


def _packed(head: Mapping[str, Any]) -> bytes:
  text = json.dumps(head, separators=(',', ':')).encode()
  return _HEAD.pack(len(text)) + text


def _state_of(value: Mapping[str, Any]) -> SyncerState:
  state: Any = from_jsonable(value)
  assert isinstance(state, SyncerState)
  return state
