"""A tape replayed: the machines must decide again as they did."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from decoupled_diloco.observe.tape import Tape
from decoupled_diloco.observe.tape_lines import TapeHeader
from decoupled_diloco.protocol.learner import learner_machine
from decoupled_diloco.protocol.learner_state import LearnerOptions
from decoupled_diloco.protocol.machine import Machine, replay
from decoupled_diloco.protocol.syncer import syncer_machine
from decoupled_diloco.protocol.syncer_state import SyncerOptions

Options = TypeVar('Options')


def replay_tape(tape: Tape) -> int:
  """Feeds every segment's events to a machine and compares the effects.

  A segment of a syncer that was started again begins with what it has restored
  (`Restarted`), so each replays by itself.

  Returns:
    The number of events.

  Raises:
    ValueError: at the first event whose effects differ.
  """
  return sum(
    replay(machine_of(segment.header), segment.steps)
    for segment in tape.segments
  )


def machine_of(header: TapeHeader) -> Machine[Any]:
  """The machine that wrote a segment."""
  if header.machine == 'syncer':
    return syncer_machine(_options(SyncerOptions, header.options))
  return learner_machine(_options(LearnerOptions, header.options))


def _options(kind: type[Options], values: Mapping[str, Any]) -> Options:
  """Options as they were before they became JSON."""
  hints = typing.get_type_hints(kind)
  fields: dict[str, Any] = {}
  for name, value in values.items():
    hint = hints[name]
    if dataclasses.is_dataclass(hint):
      value = _options(hint, value)  # pyright: ignore[reportArgumentType]
    elif hint is float:
      value = float(value)
    elif isinstance(value, list):
      value = tuple(value)
    fields[name] = value
  return kind(**fields)
