"""Every message, event and effect as one JSON line, and back.

What the machines remember, which an event can hold, is written like them.

The lines of a machine, each event followed by its effects, are the event tape:
a machine that is fed the events of a tape again gives the same effects.
"""

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias, get_args

from decoupled_diloco.protocol.effects import Effect, Share
from decoupled_diloco.protocol.events import Event, PayloadFacts
from decoupled_diloco.protocol.grace import GraceState
from decoupled_diloco.protocol.learner_state import (
  Flight,
  LearnerState,
  Ledger,
  Staged,
)
from decoupled_diloco.protocol.learner_state import Phase as LearnerPhase
from decoupled_diloco.protocol.membership import Member
from decoupled_diloco.protocol.messages import (
  Message,
  Reason,
  Refusal,
)
from decoupled_diloco.protocol.outliers import OutlierState, Sample
from decoupled_diloco.protocol.rounds import Round, Stage
from decoupled_diloco.protocol.syncer_state import Phase, SyncerState

Record: TypeAlias = Message | Event | Effect | PayloadFacts | Share
Part: TypeAlias = (
  SyncerState
  | Round
  | Member
  | GraceState
  | OutlierState
  | Sample
  | LearnerState
  | Ledger
  | Flight
  | Staged
)

_RECORDS: Mapping[str, type] = {
  record.__name__: record for record in (*get_args(Record), *get_args(Part))
}
_ENUMS: Mapping[tuple[type, str], type[enum.StrEnum]] = {
  (Refusal, 'reason'): Reason,
  (Round, 'stage'): Stage,
  (SyncerState, 'phase'): Phase,
  (LearnerState, 'phase'): LearnerPhase,
}


def to_jsonable(record: Record | Part) -> dict[str, Any]:
  """A record as a JSON object whose first member is its type."""

  def convert(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
      fields = dataclasses.fields(value)
      return {
        'type': type(value).__name__,
        **{field.name: convert(getattr(value, field.name)) for field in fields},
      }
    names = getattr(value, '_fields', None)  # Of a named tuple.
    if isinstance(value, tuple) and names is not None:
      return {
        'type': type(value).__name__,
        **dict(zip(names, map(convert, value), strict=True)),
      }
    if isinstance(value, Mapping):
      items = [[convert(key), convert(item)] for key, item in value.items()]
      return {'type': 'Mapping', 'items': items}
    if isinstance(value, frozenset):
      return {'type': 'Set', 'items': [convert(item) for item in sorted(value)]}
    if isinstance(value, tuple):
      return [convert(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(
        f'{type(record).__name__} holds {value}, which JSON cannot; use None.'
      )
    return value

  return convert(record)


def to_json(record: Record) -> str:
  """A record as one line of JSON. Floats survive exactly.

  >>> from decoupled_diloco.protocol.messages import RoundOpened
  >>> to_json(RoundOpened(round=7, fragment=1))
  '{"type":"RoundOpened","round":7,"fragment":1}'
  """
  return json.dumps(to_jsonable(record), separators=(',', ':'))


def from_jsonable(value: Mapping[str, Any]) -> Any:
  """The inverse of `to_jsonable`.

  Raises:
    ValueError: if the object is no record, or its members are not its fields.
  """
  members = dict(value)
  name = members.pop('type', None)
  record = _RECORDS.get(name) if isinstance(name, str) else None
  if record is None:
    raise ValueError(f'{name!r} is no record of this protocol.')
  try:
    converted = {key: _field_value(item) for key, item in members.items()}
    for (kind, field), values in _ENUMS.items():
      if record is kind and field in converted:
        converted[field] = values(converted[field])
    return record(**converted)
  except TypeError as error:
    raise ValueError(
      f'{name} with members {sorted(members)}: {error}'
    ) from None


def from_json(line: str) -> Record:
  """The record of one line.

  Raises:
    ValueError: if the line is no JSON object or no record.
  """
  value = json.loads(line)
  if not isinstance(value, dict):
    raise ValueError(f'A record is a JSON object, not {type(value).__name__}.')
  return from_jsonable(value)


def _field_value(value: Any) -> Any:
  if isinstance(value, dict):
    match value:
      case {'type': 'Mapping', 'items': [*items]}:
        return _mapping(items)
      case {'type': 'Set', 'items': [*items]}:
        return frozenset(_field_value(item) for item in items)
    return from_jsonable(value)
  if isinstance(value, list):
    return tuple(_field_value(item) for item in value)
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f'A record holds no {value}; null stands for none.')
  return value


def _mapping(items: list[Any]) -> dict[Any, Any]:
  if not all(isinstance(item, list) and len(item) == 2 for item in items):
    raise ValueError('The items of a mapping are pairs of a key and a value.')
  return {_field_value(key): _field_value(value) for key, value in items}
