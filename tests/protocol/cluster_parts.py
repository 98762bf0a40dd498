"""What a scripted cluster is made of: options, learners, ways between them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.learner_state import (
  LearnerOptions,
  LearnerState,
)
from decoupled_diloco.protocol.machine import Machine
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.quorum import QuorumOptions
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.syncer_state import (
  BudgetOptions,
  SyncerOptions,
)
from decoupled_diloco.protocol.weights import StalenessOptions

TOKENS_PER_STEP = 100


def syncer_options(
  M: int = 2,
  k_min: int = 1,
  H: int = 6,
  P: int = 6,
  rounds: int = 10,
  **overrides,
) -> SyncerOptions:
  """Options for tests: no silence is ever too long unless a test says so."""
  options: dict[str, Any] = {
    'run_id': 'run',
    'layout': 'layout',
    'schedule': ScheduleOptions(sync_every=H, num_fragments=P),
    'membership': MembershipOptions(
      num_learners=M, heartbeat_seconds=1.0, liveness_timeout_seconds=1e6
    ),
    'quorum': QuorumOptions(min_learners=k_min),
    'grace': GraceOptions(),
    'staleness': StalenessOptions(),
    'budget': BudgetOptions(rounds=rounds),
    'max_rounds_in_flight': 4,
  }
  return SyncerOptions(**(options | overrides))


@dataclasses.dataclass
class Learner:
  """One learner's machine and what happened to it."""

  options: LearnerOptions
  scan_seconds: Callable[[], float]
  machine: Machine[LearnerState]
  state: LearnerState
  is_alive: bool = True
  is_partitioned: bool = False
  scans: int = 0
  scan_time: float = 0.0
  life: int = 0
  link: int = 0
  wake_at: float = 0.0
  handed_over: dict[int, float] = dataclasses.field(default_factory=dict)
  adopted: list[fx.Adopt] = dataclasses.field(default_factory=list)
  overlaps: list[float] = dataclasses.field(default_factory=list)
  starts: list[int] = dataclasses.field(default_factory=list)
  tape: list[tuple[ev.Event, tuple[fx.Effect, ...]]] = dataclasses.field(
    default_factory=list
  )
  end: fx.Finish | None = None


class Route(NamedTuple):
  """The way to a learner: its connection, and who it was welcomed as."""

  link: int
  incarnation: int


def sound(contribution: msg.Contribution) -> tuple[ev.PayloadFacts, ...]:
  """Every contribution arrives once, and in order."""
  del contribution
  return (ev.PayloadFacts(8, norm=1.0),)
