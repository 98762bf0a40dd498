"""What the syncer machine is configured with, and what it remembers."""

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import NamedTuple

from decoupled_diloco.protocol import grace, outliers, rounds
from decoupled_diloco.protocol.grace import GraceOptions, GraceState
from decoupled_diloco.protocol.membership import Member, MembershipOptions
from decoupled_diloco.protocol.outliers import OutlierOptions, OutlierState
from decoupled_diloco.protocol.quorum import QuorumOptions
from decoupled_diloco.protocol.rounds import Round
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.weights import StalenessOptions


@dataclasses.dataclass(frozen=True, slots=True)
class BudgetOptions:
  """When the run is over: at the first budget that is met.

  Attributes:
    rounds: rounds of the run, before those of the drain; 0 means no limit.
    merged_tokens: tokens in merged contributions, each fragment counting 1/P;
      0 means no limit.
    drain_seconds: how long the last merge of every fragment may wait for
      learners.
    stop_seconds: the same, when somebody wants the run to end now.
  """

  rounds: int = 0
  merged_tokens: int = 0
  drain_seconds: float = 30.0
  stop_seconds: float = 4.0

  def __post_init__(self):
    if self.rounds < 0 or self.merged_tokens < 0:
      raise ValueError(
        f'rounds={self.rounds} and merged_tokens={self.merged_tokens} must not '
        'be negative; 0 means no limit.'
      )
    if not self.rounds and not self.merged_tokens:
      raise ValueError(
        'rounds=0 and merged_tokens=0: the run would never end; set one.'
      )
    for name in ('drain_seconds', 'stop_seconds'):
      if getattr(self, name) <= 0:
        raise ValueError(f'{name}={getattr(self, name)} must be positive.')

  def steps(self, schedule: ScheduleOptions) -> int:
    """The run's inner steps, as the schedule counts them; 0: no limit."""
    tokens = float(self.merged_tokens)
    return schedule.global_step_of(self.rounds, tokens)

  def outer_steps(self, schedule: ScheduleOptions) -> float:
    """How often each fragment is merged in the run, if nothing is lost."""
    steps = self.steps(schedule)
    return steps / schedule.sync_every if steps else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class SyncerOptions:
  """Everything that the syncer's decisions depend on.

  Attributes:
    run_id: name of the run, chosen once.
    layout: digest of the fragment plan and the codecs.
    max_rounds_in_flight: a learner's greatest lead, as in `LearnerOptions`.
  """

  run_id: str
  layout: str
  schedule: ScheduleOptions
  membership: MembershipOptions
  quorum: QuorumOptions
  grace: GraceOptions
  staleness: StalenessOptions
  budget: BudgetOptions
  max_rounds_in_flight: int
  outliers: OutlierOptions = dataclasses.field(default_factory=OutlierOptions)

  def __post_init__(self):
    if self.quorum.min_learners > self.membership.num_learners:
      raise ValueError(
        f'min_learners={self.quorum.min_learners} must not exceed num_learners='
        f'{self.membership.num_learners}; no round could ever be merged.'
      )

  @property
  def rounds_remembered(self) -> int:
    """How many rounds back something may still come for a round."""
    return 2 * (self.max_rounds_in_flight + 1)

  def newest_proposal(self, current: int) -> int:
    """The newest round that a learner may hand over for, before the drain."""
    return current + self.max_rounds_in_flight + 1


class Phase(enum.StrEnum):
  """Where the run stands."""

  GATHERING = 'gathering'  # Learners join and compile.
  RUNNING = 'running'
  DRAINING = 'draining'  # The budget is met; every fragment once more.
  SAVING = 'saving'  # All is merged; the shell saves it.
  FINISHED = 'finished'


class SyncerState(NamedTuple):
  """What the syncer machine remembers.

  Attributes:
    current: the current round; -1 before the first.
    paced_at: when the round before it had its quorum, or the run began.
    rounds: the rounds that can still change something, by number.
    versions: per fragment, how many outer updates were published.
    version_rounds: per fragment, the round that made this version; or -1.
    members: by learner.
    closed_at: by round, when it was closed: lately published ones.
    cancelled: lately ended rounds that were not merged.
    rounds_merged: outer updates so far.
    merged_tokens: tokens merged, each fragment counting 1/P.
    next_incarnation: for the next admission.
    began_at: time of the first event.
    drain_open: rounds of the drain that may still be joined.
    drain_seconds: how long the drain waits for learners.
    drain_until: when it waits no longer; after that, when learners are told
      next that the syncer is there.
    end_reason: why the run drained.
    has_met_budget: whether that was because its budget is met.
    absent: the learners that a shortage was last told about; None if none is.
    wake_at: the earliest time already asked for.
    returning_until: after a restart, how long learners may take to come back
      before the drain goes on without them.
  """

  phase: Phase
  current: int
  paced_at: float
  rounds: Mapping[int, Round]
  versions: tuple[int, ...]
  version_rounds: tuple[int, ...]
  members: Mapping[int, Member]
  grace: GraceState
  outliers: OutlierState
  closed_at: Mapping[int, float]
  cancelled: frozenset[int]
  rounds_merged: int
  merged_tokens: float
  next_incarnation: int
  began_at: float | None
  drain_open: frozenset[int]
  drain_seconds: float
  drain_until: float
  end_reason: str
  has_met_budget: bool
  absent: tuple[int, ...] | None
  wake_at: float | None
  returning_until: float

  def with_round(self, round_: Round) -> 'SyncerState':
    """The state with this round in place of the one of its number."""
    return self._replace(rounds={**self.rounds, round_.number: round_})

  def without_round(self, number: int) -> 'SyncerState':
    """The state without a round."""
    rounds = {key: value for key, value in self.rounds.items() if key != number}
    return self._replace(rounds=rounds)

  def with_member(self, learner: int, member: Member) -> 'SyncerState':
    """The state with this member in place of the one of its number."""
    return self._replace(members={**self.members, learner: member})

  def round_of(self, options: SyncerOptions, number: int) -> Round:
    """The round of this number, new if nothing has come for it."""
    return self.rounds.get(number) or Round(
      number, options.schedule.fragment_of(number)
    )

  def return_times(self, options: SyncerOptions) -> Mapping[int, float]:
    """When those who cannot come back to the current round count as such."""
    return rounds.return_times(
      self.round_of(options, self.current),
      paced_at=self.paced_at,
      steps_per_scan=options.schedule.steps_per_scan,
      num_fragments=options.schedule.num_fragments,
    )

  @property
  def connected(self) -> tuple[int, ...]:
    """The connected learners, in order."""
    return tuple(
      sorted(
        learner
        for learner, member in self.members.items()
        if member.is_connected
      )
    )

  @property
  def ready(self) -> frozenset[int]:
    """The learners that train, or could."""
    return frozenset(
      learner for learner, member in self.members.items() if member.is_expected
    )

  def awaits_return(self, now: float) -> bool:
    """Whether learners may still come back after a restart of the syncer."""
    return now < self.returning_until and not all(
      member.farewell is not None or (member.is_connected and member.is_ready)
      for member in self.members.values()
    )

  def expected_in(self, number: int) -> frozenset[int]:
    """The learners that a round of everybody includes."""
    return frozenset(
      learner
      for learner, member in self.members.items()
      if member.may_join(number)
    )


def initial_state(options: SyncerOptions) -> SyncerState:
  """Nobody is there and nothing is merged."""
  P = options.schedule.num_fragments
  return SyncerState(
    phase=Phase.GATHERING,
    current=-1,
    paced_at=0.0,
    rounds={},
    versions=(0,) * P,
    version_rounds=(-1,) * P,
    members={},
    grace=grace.init(),
    outliers=outliers.outlier_guard(options.outliers).init(),
    closed_at={},
    cancelled=frozenset(),
    rounds_merged=0,
    merged_tokens=0.0,
    next_incarnation=1,
    began_at=None,
    drain_open=frozenset(),
    drain_seconds=0.0,
    drain_until=0.0,
    end_reason='',
    has_met_budget=False,
    absent=None,
    wake_at=None,
    returning_until=0.0,
  )
