"""What a machine is, and how a tape is replayed through one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from decoupled_diloco.protocol.effects import Effect
from decoupled_diloco.protocol.events import Event

State = TypeVar('State')

# Is told every event of a machine with its effects, in order; what it returns
# is ignored. So tapes are written.
OnStep: TypeAlias = Callable[[Event, Sequence[Effect]], object]


class Machine(NamedTuple, Generic[State]):
  """A pair of pure functions, in the manner of an optax transformation.

  Attributes:
    init: gives the first state.
    step: `(state, event) -> (state, effects)`.
  """

  init: Callable[[], State]
  step: Callable[[State, Event], tuple[State, tuple[Effect, ...]]]


def run(
  machine: Machine[State], events: Iterable[Event]
) -> Iterator[tuple[Event, tuple[Effect, ...]]]:
  """Feeds events to a machine; yields each with the effects it gave."""
  state = machine.init()
  for event in events:
    state, effects = machine.step(state, event)
    yield event, effects


def replay(
  machine: Machine[State],
  tape: Iterable[tuple[Event, tuple[Effect, ...]]],
) -> int:
  """Feeds the events of a tape to a machine and compares the effects.

  Args:
    machine: made with the options of the run that wrote the tape.
    tape: events, each with the effects that it had.

  Returns:
    The number of events.

  Raises:
    ValueError: at the first event whose effects differ.
  """
  state = machine.init()
  count = 0
  for event, expected in tape:
    state, effects = machine.step(state, event)
    if effects != expected:
      raise ValueError(
        f'event {count} of the tape, {event}, had the effects {expected}; '
        f'replayed it has {effects}.'
      )
    count += 1
  return count
