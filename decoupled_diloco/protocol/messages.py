"""What learners and the syncer say to each other.

`Hello` to `Farewell` go from a learner to the syncer, `Welcome` to `RunEnded`
the other way. A message is a frozen record of numbers, strings and tuples; the
arrays of a contribution or a publication travel beside it, as a payload.
"""

import dataclasses
import enum
from typing import TypeAlias

PROTOCOL_VERSION = 1


class Reason(enum.StrEnum):
  """Why a contribution was refused, in one word that can be counted."""

  LATE = 'late'  # The round was closed.
  DUPLICATE = 'duplicate'  # This learner is in this round already.
  FENCED = 'fenced'  # Sent by an older incarnation, or before any welcome.
  UNKNOWN_ROUND = 'unknown_round'  # Too far ahead to be one of ours.
  WRONG_FRAGMENT = 'wrong_fragment'  # Not what the schedule gives this round.
  STALE = 'stale'  # The base is too many versions old, or from the future.
  EMPTY = 'empty'  # No steps or no tokens: nothing to weigh.
  CORRUPT = 'corrupt'  # Damaged on its way: hand over again.
  WRONG_LAYOUT = 'wrong_layout'  # Whole, but not as long as its fragment.
  NO_QUORUM = 'no_quorum'  # Its round ended without a merge.
  NOT_FINITE = 'not_finite'  # NaN or infinity in the delta.
  OUTLIER = 'outlier'  # The delta is wildly larger than those before it.
  DRAINING = 'draining'  # The round ended without a quorum at the drain.


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
  """A learner asks to be admitted, or admitted again.

  Attributes:
    learner: which learner, 0 <= learner < M.
    layout: digest of the fragment plan and the codecs; must equal the syncer's.
    run_id: the run that this process already belongs to; '' if it is new.
    incarnation: the last one that this process was given; 0 if none.
    versions: the version of every fragment that it holds; () if none.
    protocol: version of this message set.
  """

  learner: int
  layout: str
  run_id: str = ''
  incarnation: int = 0
  versions: tuple[int, ...] = ()
  protocol: int = PROTOCOL_VERSION


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
  """The learner has compiled its scan and holds every fragment."""

  learner: int
  incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Contribution:
  """A learner's delta for one fragment in one round; the delta is the payload.

  Attributes:
    learner: which learner.
    incarnation: which life of it.
    round: the round it is meant for.
    fragment: the fragment of that round.
    base_version: version of the global fragment that the delta starts from.
    steps: inner steps since the learner adopted the fragment.
    tokens: tokens in those steps.
    total_steps: inner steps of the learner since the run began, over all its
      incarnations: its position in its data. Steps that were lost with a
      process are done again, and count once.
    total_tokens: tokens in those.
    step_seconds: mean time of an inner step in the last scan.
    is_waiting: no scan follows before the learner has adopted this round.
  """

  learner: int
  incarnation: int
  round: int
  fragment: int
  base_version: int
  steps: int
  tokens: int
  total_steps: int
  total_tokens: int
  step_seconds: float
  is_waiting: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Heartbeat:
  """The learner is alive, and this is how it is doing.

  Attributes:
    activity: 'compiling', 'training', 'waiting' or 'draining'.
    total_steps, total_tokens: as in `Contribution`.
    tokens_per_second: over the last scan, waiting excluded.
    loss: mean training loss of the last scan, in nats per token.
    round: the newest round it handed over; -1 if none.
    adopted_round: the newest round it adopted; -1 if none.
  """

  learner: int
  incarnation: int
  activity: str
  total_steps: int
  total_tokens: int
  tokens_per_second: float
  loss: float | None = None
  round: int = -1
  adopted_round: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
  """The learner has received the publication of a round."""

  learner: int
  incarnation: int
  round: int


@dataclasses.dataclass(frozen=True, slots=True)
class Lacking:
  """The learner cannot use a publication; it needs the values themselves.

  A publication was damaged on its way, or updates a version that never came.
  """

  learner: int
  incarnation: int
  fragments: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Farewell:
  """The learner hands nothing over any more.

  Attributes:
    rounds: those that it has handed over and not heard of; their contributions
      may still be on their way, for messages without a payload overtake them.
  """

  learner: int
  incarnation: int
  reason: str
  rounds: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
  """The learner is in; every fragment it lacks follows as a publication.

  Attributes:
    incarnation: number of this life of the learner; older ones are fenced.
    run_id: name of the run.
    round: the newest open round; -1 before the first.
    last_round: the newest round that holds a contribution of this learner, of
      whatever incarnation; -1 if none.
    versions: current version of every fragment.
    merged_rounds: per fragment, the last round in which it was merged;
      or -1.
    total_steps, total_tokens: how far into its data the contributions of this
      learner reach that were merged, or are held to be.
    held_rounds: those that hold a contribution of it and are not merged yet.
    drain_first: the first round of the drain; -1 before it.
  """

  learner: int
  incarnation: int
  run_id: str
  round: int
  last_round: int
  versions: tuple[int, ...]
  merged_rounds: tuple[int, ...]
  total_steps: int = 0
  total_tokens: int = 0
  held_rounds: tuple[int, ...] = ()
  drain_first: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Rejection:
  """The learner is not admitted; trying again will not help."""

  learner: int
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class RoundOpened:
  """The syncer's current round is now this one."""

  round: int
  fragment: int


@dataclasses.dataclass(frozen=True, slots=True)
class Publication:
  """A new version of a fragment; its values or its update are the payload.

  Attributes:
    round: the round that made this version; -1 for the initial parameters.
    fragment: which fragment.
    version: its new version.
    contributors: the learners whose contributions were merged.
    form: 'value' (the fragment itself) or 'update' (to add to the version
      before).
    merged_round: of a value sent to one learner, the last round of the fragment
      in which a contribution of this learner was merged; else -1.
    merged_tokens: tokens that the run has merged, each fragment counting 1/P.
  """

  round: int
  fragment: int
  version: int
  contributors: tuple[int, ...]
  form: str
  merged_round: int = -1
  merged_tokens: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
  """A contribution was not accepted, or was dropped before its merge."""

  learner: int
  incarnation: int
  round: int
  fragment: int
  reason: Reason
  detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class DrainStarted:
  """The budget is met: hand every fragment over once more, train no further.

  It is said again for as long as the syncer then merges and saves, so that
  learners know that it is there.

  Attributes:
    first_round: the P rounds from here on are the last.
    seconds: how long the syncer waits for them. A learner that hears nothing
      for twice this time gives it up.
  """

  first_round: int
  seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class RunEnded:
  """All is merged that could be; nothing more is wanted of the learner.

  Attributes:
    is_early: it was stopped before its budget was met, and may be continued.
  """

  reason: str
  is_early: bool = False


Message: TypeAlias = (
  Hello
  | Ready
  | Contribution
  | Heartbeat
  | Receipt
  | Lacking
  | Farewell
  | Welcome
  | Rejection
  | RoundOpened
  | Publication
  | Refusal
  | DrainStarted
  | RunEnded
)
