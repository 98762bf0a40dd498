"""What is known of a run, as figures; `status` fills them in."""

import dataclasses
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from decoupled_diloco.observe import words
from decoupled_diloco.observe.learner_status import LearnerStatus
from decoupled_diloco.observe.series import Series
from decoupled_diloco.observe.tape_lines import TapeHeader
from decoupled_diloco.protocol.effects import Merge
from decoupled_diloco.protocol.messages import Contribution

_HAPPENINGS_KEPT = 64


class Happening(NamedTuple):
  """Something that people should be told once.

  Attributes:
    number: from 0, so that one who watches can tell what is new.
    at: when, on the clock of `RunStatus.now`.
    kind: 'notice', 'joined', 'back', 'lost', 'left', 'rejected', 'started',
      'finished' or 'syncer'.
    text: one sentence.
  """

  number: int
  at: float
  kind: str
  text: str


class Fault(NamedTuple):
  """A loss that the run has survived: who was lost is there again.

  Attributes:
    at: when it was there again, on the clock of `RunStatus.now`.
    learner: who was lost; None: the syncer.
    seconds_away: from the last sign of life to the return.
    reason: as the syncer saw it.
    is_new_process: whether a new process came back, and not only a connection.
  """

  at: float
  learner: int | None
  seconds_away: float
  reason: str
  is_new_process: bool


class ReceiptsDue(NamedTuple):
  """A published round, and the learners that have not received it yet."""

  round: int
  learners: frozenset[int]


@dataclasses.dataclass(slots=True)
class RunStatus:
  """One run, as seen from its syncer.

  All times are seconds on the clock of the tape's events. If a restarted syncer
  has a clock that began anew, its times are moved to follow on the old ones;
  then the time between is missing.

  Attributes:
    run_id: name of the run.
    num_fragments: P.
    fragment_sizes: elements of every fragment.
    fragment_value_bytes: bytes of every fragment when it is sent as a value.
    min_learners: K_min.
    budget_rounds, budget_tokens: when the run is over; 0 means no limit.
    learners: M of them, by number, whether they were ever seen or not.
    segment: number of the tape's segment that is being folded.
    phase: one of `words.PHASES`.
    now: time of the last event.
    began_at: time of the first event; None before it.
    opened_at: when round 0 was opened.
    drain_at: when the drain began.
    ended_at: when the run was over.
    end_reason: why it ended; '' before that.
    is_failure: whether it ended because something went wrong.
    current_round: the round opened last; -1 before the first.
    rounds_merged: rounds merged, those of the drain included.
    merged_tokens: each merge of a fragment credits its contributions' tokens
      with weight 1/P.
    contributors: of the round merged last.
    quorum_seconds: from a round's first contribution to its quorum.
    grace_seconds: how long more contributions were admitted after it, at most.
    bytes_up: payload bytes received from learners, refused ones included;
      messages without payload are not counted.
    bytes_down: payload bytes sent to learners.
    accepted_bits, accepted_elements: of the payloads of accepted contributions,
      and of their fragments.
    published_bits, published_elements: of publications, each counted once
      however many learners it goes to.
    refusals: refused contributions of all learners, by reason.
    rejections: learners that were not admitted.
    faults: losses survived.
    happenings: the last 64.
    happenings_count: how many there were.
    accepted: contributions that wait for their merge, by (round, learner).
    merging: merges that are not done, by round.
    receipts_due: the newest publication of a fragment, by fragment, while a
      connected learner has not received it.
    clock_offset: what is added to the time of an event.
    is_resuming: the syncer was started again and has had no event yet.
  """

  run_id: str
  num_fragments: int
  fragment_sizes: tuple[int, ...]
  fragment_value_bytes: tuple[int, ...]
  min_learners: int
  budget_rounds: int
  budget_tokens: int
  learners: Mapping[int, LearnerStatus]
  segment: int = 0
  phase: str = words.GATHERING
  now: float = 0.0
  began_at: float | None = None
  opened_at: float | None = None
  drain_at: float | None = None
  ended_at: float | None = None
  end_reason: str = ''
  is_failure: bool = False
  current_round: int = -1
  rounds_merged: int = 0
  merged_tokens: float = 0.0
  contributors: tuple[int, ...] = ()
  quorum_seconds: Series = dataclasses.field(default_factory=Series)
  grace_seconds: Series = dataclasses.field(default_factory=Series)
  bytes_up: int = 0
  bytes_down: int = 0
  accepted_bits: int = 0
  accepted_elements: int = 0
  published_bits: int = 0
  published_elements: int = 0
  refusals: Counter[str] = dataclasses.field(default_factory=Counter)
  rejections: int = 0
  faults: list[Fault] = dataclasses.field(default_factory=list)
  happenings: deque[Happening] = dataclasses.field(
    default_factory=lambda: deque(maxlen=_HAPPENINGS_KEPT)
  )
  happenings_count: int = 0
  accepted: dict[tuple[int, int], Contribution] = dataclasses.field(
    default_factory=dict
  )
  merging: dict[int, Merge] = dataclasses.field(default_factory=dict)
  receipts_due: dict[int, ReceiptsDue] = dataclasses.field(default_factory=dict)
  clock_offset: float = 0.0
  is_resuming: bool = False

  @property
  def connected(self) -> tuple[int, ...]:
    """The connected learners, in order."""
    return tuple(
      learner.learner
      for learner in self.learners.values()
      if learner.is_connected
    )

  @property
  def processed_tokens(self) -> int:
    """Tokens that all learners together have trained on."""
    return sum(learner.processed_tokens for learner in self.learners.values())

  @property
  def publications_in_flight(self) -> int:
    """Fragments whose newest version a connected learner has not received."""
    return len(self.receipts_due)

  @property
  def bits_up(self) -> float | None:
    """Bits per parameter and synchronisation, from a learner."""
    if not self.accepted_elements:
      return None
    return self.accepted_bits / self.accepted_elements

  @property
  def bits_down(self) -> float | None:
    """Bits per parameter and synchronisation, to a learner."""
    if not self.published_elements:
      return None
    return self.published_bits / self.published_elements

  @property
  def startup_seconds(self) -> float | None:
    """From the first event to the opening of round 0."""
    if self.opened_at is None or self.began_at is None:
      return None
    return self.opened_at - self.began_at

  @property
  def wall_seconds(self) -> float:
    """From the opening of round 0 to the beginning of the drain, or to now.

    The start-up before and the drain after are no time of training, and are
    reported apart.
    """
    if self.opened_at is None:
      return 0.0
    return self._until(self.drain_at) - self.opened_at

  @property
  def drain_seconds(self) -> float:
    """From the beginning of the drain to the end of the run, or to now."""
    if self.drain_at is None:
      return 0.0
    return self._until(self.ended_at) - self.drain_at

  @property
  def elapsed_seconds(self) -> float:
    """From the opening of round 0 to the end of the run, or to now."""
    if self.opened_at is None:
      return 0.0
    return self._until(self.ended_at) - self.opened_at

  def weight_share(self, learner: int) -> float | None:
    """A learner's mean share of the weight over all merged rounds.

    The shares of all learners add up to 1.
    """
    if not self.rounds_merged:
      return None
    return self.learners[learner].weight_sum / self.rounds_merged

  def tell(self, kind: str, text: str) -> None:
    """Adds a happening; the text becomes a sentence if it is none."""
    if not text.endswith(('.', '!', '?')):
      text += '.'
    number = self.happenings_count
    self.happenings.append(Happening(number, self.now, kind, text))
    self.happenings_count += 1

  def _until(self, end: float | None) -> float:
    return self.now if end is None else end


def new_run(header: TapeHeader) -> RunStatus:
  """A run of which nothing has happened yet.

  Raises:
    ValueError: if the header is not that of a syncer, or lacks something.
  """
  if header.machine != 'syncer':
    raise ValueError(
      f'this is the tape of a {header.machine}; the status of a run is made '
      "from its syncer's tape."
    )
  options = header.options
  try:
    num_fragments = options['schedule']['num_fragments']
    num_learners = options['membership']['num_learners']
    budget = options['budget']
    status = RunStatus(
      run_id=options['run_id'],
      num_fragments=num_fragments,
      fragment_sizes=tuple(header.fragment_sizes),
      fragment_value_bytes=tuple(
        header.facts.get('fragment_value_bytes')
        or (4 * size for size in header.fragment_sizes)
      ),
      min_learners=options['quorum']['min_learners'],
      budget_rounds=budget['rounds'],
      budget_tokens=budget['merged_tokens'],
      learners={m: LearnerStatus(m) for m in range(num_learners)},
    )
  except KeyError as error:
    raise ValueError(
      f'the tape header has no option {error}; a header is made with '
      'TapeHeader.of(machine, options, fragment_sizes).'
    ) from None
  for name in ('fragment_sizes', 'fragment_value_bytes'):
    count = len(getattr(status, name))
    if count != num_fragments:
      raise ValueError(
        f'the tape header has {count} {name} for num_fragments={num_fragments}.'
      )
  return status
