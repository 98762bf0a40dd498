"""What the learner machine is configured with, and what it remembers."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Literal, NamedTuple

from decoupled_diloco.protocol.messages import Contribution
from decoupled_diloco.protocol.schedule import ScheduleOptions


@dataclasses.dataclass(frozen=True, slots=True)
class LeadOptions:
  """How far a learner may run ahead of what it has adopted.

  Attributes:
    max_rounds_in_flight: the greatest lead (the last round handed over minus
      the last one adopted) with which a learner trains. It must exceed the
      overlap plus the round trip, in scans.
    on_lead_limit: 'train' hands nothing over at the limit and trains on; 'wait'
      starts no further scan until a publication was adopted (with a limit of 0
      and K_min = M: DiLoCo and Streaming DiLoCo as published).
  """

  max_rounds_in_flight: int = 4
  on_lead_limit: Literal['train', 'wait'] = 'train'

  def __post_init__(self):
    if self.on_lead_limit not in ('train', 'wait'):
      raise ValueError(
        f"on_lead_limit={self.on_lead_limit!r} must be 'train' or 'wait'."
      )
    least = 1 if self.on_lead_limit == 'train' else 0
    if self.max_rounds_in_flight < least:
      raise ValueError(
        f'max_rounds_in_flight={self.max_rounds_in_flight} must be at least '
        f'{least} with on_lead_limit={self.on_lead_limit!r}; a learner that '
        'trains on with a limit of 0 would never hand anything over.'
      )


@dataclasses.dataclass(frozen=True, slots=True)
class LearnerOptions:
  """Everything that a learner's decisions depend on.

  Attributes:
    learner: its number, from 0.
    schedule: H and P.
    max_rounds_in_flight, on_lead_limit: as in `LeadOptions`.
    keeps_progress: whether adoption leaves in place what no merge has seen
      (the adoption rule `rebase`).
  """

  learner: int
  schedule: ScheduleOptions
  max_rounds_in_flight: int
  on_lead_limit: str
  keeps_progress: bool


class Phase(enum.StrEnum):
  """What a learner is doing."""

  JOINING = 'joining'  # It compiles, or lacks fragments.
  WAITING = 'waiting'  # It could train, but the protocol holds it.
  TRAINING = 'training'  # A scan is running.
  DRAINING = 'draining'  # It trains no further.
  FINISHED = 'finished'


class Flight(NamedTuple):
  """A hand-over whose fate is not known, or not acted on, yet."""

  round: int
  contribution: Contribution
  is_merged: bool = False
  resends: int = 0


class Ledger(NamedTuple):
  """One fragment's books.

  Attributes:
    base_version: the version adopted last; -1 if none.
    steps, tokens: the local progress that the next hand-over will hold.
    flight: the last hand-over, until its fate is known.
    merged_round: the last round in which this learner was merged, as far as the
      local copy knows; -1 if none.
    is_void: its local copy holds work that a former process has handed over
      since the snapshot was taken: it must be adopted anew.
  """

  base_version: int = -1
  steps: int = 0
  tokens: int = 0
  flight: Flight | None = None
  merged_round: int = -1
  is_void: bool = False


class Staged(NamedTuple):
  """A version that has come in and waits for the scan boundary."""

  round: int
  version: int


class LearnerState(NamedTuple):
  """What the learner machine remembers.

  Attributes:
    is_announced: the syncer knows that this incarnation is ready.
    newest_round: the newest open round that it has heard of; -1 if none.
    last_round: the newest round that it handed over; -1 if none.
    missed: rounds whose hand-over was lost while they were open.
    adopted_round: the newest round that it adopted; -1 if none.
    ledgers: per fragment.
    awaited: per fragment, the version from which on this process may train.
    staged: per fragment, the newest version that has come in.
    merged_tokens: of the run, as last heard.
    total_steps, total_tokens: over all its incarnations.
    step_seconds: mean time of an inner step in the last scan.
    drain_first: the first round of the drain; None before it.
    drained: rounds of the drain that were handed over.
    leave_at: when a draining learner gives the syncer up.
    waits_for: the reason that was last told.
    receipt_due_at: before then it sends no receipt.
  """

  phase: Phase
  is_compiled: bool
  is_connected: bool
  is_announced: bool
  has_said_farewell: bool
  incarnation: int
  run_id: str
  newest_round: int
  last_round: int
  missed: frozenset[int]
  adopted_round: int
  ledgers: tuple[Ledger, ...]
  awaited: tuple[int, ...]
  staged: Mapping[int, Staged]
  merged_tokens: float
  total_steps: int
  total_tokens: int
  step_seconds: float
  drain_first: int | None
  drained: frozenset[int]
  leave_at: float | None
  waits_for: str
  receipt_due_at: float

  @property
  def next_round(self) -> int:
    """The round that the next hand-over is for.

    One that was missed comes first while it is open: without this learner it
    might never have its quorum.
    """
    ahead = max(self.last_round + 1, self.newest_round, 0)
    return min([ahead, *(r for r in self.missed if r >= self.newest_round)])

  @property
  def lead(self) -> int:
    """How far its hand-overs are ahead of what it has adopted."""
    return min(self.last_round, self.next_round - 1) - self.adopted_round

  @property
  def holds_everything(self) -> bool:
    """Whether its copy of every fragment is as new as when it was welcomed."""
    return all(
      ledger.base_version >= awaited
      for ledger, awaited in zip(self.ledgers, self.awaited, strict=True)
    )

  @property
  def versions(self) -> tuple[int, ...]:
    """Per fragment, the newest version that it holds or has staged."""
    return tuple(
      self.staged[p].version if p in self.staged else ledger.base_version
      for p, ledger in enumerate(self.ledgers)
    )

  def with_ledger(self, fragment: int, ledger: Ledger) -> 'LearnerState':
    """The state with other books for one fragment."""
    ledgers = list(self.ledgers)
    ledgers[fragment] = ledger
    return self._replace(ledgers=tuple(ledgers))


def rejoin_step(options: LearnerOptions, state: LearnerState) -> int | None:
  """The run's global step, if it goes on already; else None."""
  if state.newest_round <= 0:
    return None
  return options.schedule.global_step_of(
    state.newest_round, state.merged_tokens
  )


def initial_state(options: LearnerOptions) -> LearnerState:
  """A process that has just been started."""
  return LearnerState(
    phase=Phase.JOINING,
    is_compiled=False,
    is_connected=False,
    is_announced=False,
    has_said_farewell=False,
    incarnation=0,
    run_id='',
    newest_round=-1,
    last_round=-1,
    missed=frozenset(),
    adopted_round=-1,
    ledgers=(Ledger(),) * options.schedule.num_fragments,
    awaited=(0,) * options.schedule.num_fragments,
    staged={},
    merged_tokens=0.0,
    total_steps=0,
    total_tokens=0,
    step_seconds=0.0,
    drain_first=None,
    drained=frozenset(),
    leave_at=None,
    waits_for='',
    receipt_due_at=0.0,
  )
