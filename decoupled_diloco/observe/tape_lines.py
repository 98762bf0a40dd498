"""The lines of an event tape: headers, and events with their effects.

A tape is made of segments, one for each process that wrote it. A segment is

  {"type":"TapeHeader","format":1,"machine":"syncer","options":{...},
   "fragment_sizes":[...],"facts":{...}}            (in one line)

and then one group of lines for every event that the machine took: the event
and its effects, as `protocol.records` writes them. The last line of a group,
and a header, ends with a space before the line feed. JSON does not mind, and a
reader knows by it that the group is whole, however the writer was killed and
however much of a write is visible already.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from decoupled_diloco.protocol.effects import Effect
from decoupled_diloco.protocol.events import Event
from decoupled_diloco.protocol.records import from_jsonable, to_json

Step: TypeAlias = tuple[Event, tuple[Effect, ...]]

FORMAT = 1
BEGIN = b'{"type":"TapeHeader"'
END = b' \n'
_EVENTS: tuple[type, ...] = get_args(Event)
_EFFECTS: tuple[type, ...] = get_args(Effect)


@dataclasses.dataclass(frozen=True, slots=True)
class TapeHeader:
  """What the events of a segment cannot say themselves.

  Attributes:
    machine: 'syncer' or 'learner'.
    options: the machine's options, as JSON; infinity is the string 'inf'.
    fragment_sizes: elements of every fragment.
    facts: anything else that is JSON. `status` makes use of these, if given:
      'fragment_value_bytes', bytes of every fragment when it is sent as a
      value (to a learner that joins); otherwise 4 bytes per element.
  """

  machine: Literal['syncer', 'learner']
  options: Mapping[str, Any]
  fragment_sizes: tuple[int, ...]
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.machine not in ('syncer', 'learner'):
      raise ValueError(
        f"machine={self.machine!r} must be 'syncer' or 'learner'."
      )

  @classmethod
  def of(
    cls,
    machine: Literal['syncer', 'learner'],
    options: Any,
    fragment_sizes: Sequence[int],
    facts: Mapping[str, Any] | None = None,
  ) -> 'TapeHeader':
    """The header for a machine's options dataclass."""
    return cls(
      machine,
      _without_infinities(dataclasses.asdict(options)),
      tuple(int(size) for size in fragment_sizes),
      _without_infinities(dict(facts or {})),
    )

  def to_json(self) -> str:
    """The header as one line of JSON."""
    return json.dumps(
      {
        'type': 'TapeHeader',
        'format': FORMAT,
        'machine': self.machine,
        'options': self.options,
        'fragment_sizes': self.fragment_sizes,
        'facts': self.facts,
      },
      separators=(',', ':'),
      allow_nan=False,
    )


def group_bytes(event: Event, effects: Sequence[Effect]) -> bytes:
  """An event and its effects as they stand on a tape."""
  lines = '\n'.join(to_json(record) for record in (event, *effects))
  return lines.encode() + END


class LineParser:
  """Turns the bytes of one tape, in order, into headers and steps.

  Attributes:
    lines: how many lines were parsed.
  """

  def __init__(self, name: str):
    """Begins at the beginning of the tape that errors call `name`."""
    self.lines = 0
    self._name = name
    self._has_header = False

  def parse(self, data: bytes) -> tuple[list[TapeHeader | Step], int]:
    """Parses what is whole.

    Args:
      data: what follows the bytes that were parsed before.

    Returns:
      Headers and steps; and the number of bytes that they took. The rest is not
      whole, or not whole yet.

    Raises:
      ValueError: if what ought to be whole is damaged.
    """
    size = data.rfind(END) + len(END) if END in data else 0
    items: list[TapeHeader | Step] = []
    event: Event | None = None
    effects: list[Effect] = []
    for line in data[:size].splitlines(keepends=True):
      self.lines += 1
      record = self._record(line)
      if isinstance(record, _EFFECTS):
        if event is None:
          raise self._damage('an effect without an event before it')
        effects.append(record)
      else:
        # Tolerated: an editor has taken the space at the end of a group away.
        if event is not None:
          items.append((event, tuple(effects)))
        event, effects = None, []
        if isinstance(record, TapeHeader):
          self._has_header = True
          items.append(record)
        elif not self._has_header:
          raise self._damage('an event before any header')
        else:
          event = record
      if line.endswith(END) and event is not None:
        items.append((event, tuple(effects)))
        event, effects = None, []
    return items, size

  def torn(self, num_bytes: int) -> str | None:
    """What to say of this many bytes after those that were parsed."""
    if not num_bytes:
      return None
    return (
      f'{self._name}: the last {num_bytes} bytes, from line {self.lines + 1} '
      'on, are not a whole event with its effects and were left out; the '
      'writer was stopped while it wrote, or still writes.'
    )

  def _record(self, line: bytes) -> Any:
    try:
      value = json.loads(line)
      if not isinstance(value, dict):
        raise ValueError(f'{type(value).__name__} instead of a JSON object')
      if value.get('type') == 'TapeHeader':
        return _header(value)
      record = from_jsonable(value)
    except KeyError as error:
      raise self._damage(f'member {error} is missing') from error
    except (ValueError, TypeError) as error:
      raise self._damage(str(error)) from error
    if not isinstance(record, _EVENTS + _EFFECTS):
      raise self._damage(
        f'{type(record).__name__} is neither an event nor an effect'
      )
    return record

  def _damage(self, what: str) -> ValueError:
    return ValueError(
      f'{self._name}, line {self.lines}: {what}. A tape holds a header, then '
      'events, each followed by its effects; what comes before can be saved '
      f'with `head -n {self.lines - 1}`.'
    )


def _header(value: Mapping[str, Any]) -> TapeHeader:
  if value.get('format') != FORMAT:
    raise ValueError(
      f'tape format {value.get("format")!r} is not {FORMAT}, the one this '
      'version reads; read it with the version that wrote it'
    )
  sizes = value['fragment_sizes']
  if not isinstance(sizes, list) or not isinstance(value['options'], dict):
    raise ValueError('the header has no fragment_sizes list or no options')
  return TapeHeader(
    value['machine'], value['options'], tuple(sizes), value['facts']
  )


def _without_infinities(value: Any) -> Any:
  """A copy in which JSON finds nothing that it cannot hold."""
  if isinstance(value, Mapping):
    return {key: _without_infinities(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_without_infinities(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value
