"""What is known of one learner."""

import dataclasses
from collections import Counter

from decoupled_diloco.observe import words
from decoupled_diloco.observe.intervals import Intervals
from decoupled_diloco.observe.series import Series


@dataclasses.dataclass(slots=True)
class LearnerStatus:
  """One learner, as seen from the syncer. Times are those of `RunStatus.now`.

  Attributes:
    learner: its number.
    state: one of `words.STATES`; between its admission and its loss that of
      its last heartbeat.
    incarnation: the last one that it was given; 0 if it was never admitted.
    is_connected: whether that incarnation is reachable.
    restarts: faults survived: how often it was admitted again after it was
      lost while connected.
    last_seen: when a message of it came last; None if never.
    lost_because: why it was lost last.
    total_steps, total_tokens: inner steps and tokens since the run began, as
      last reported, over all its incarnations.
    processed_tokens: tokens that it has trained on, work that was done again
      included: a growing `total_tokens` adds its growth; if a new incarnation
      starts with less on its books than was reported before, what it has done
      since its admission is added on top. Work that a lost process had done
      since its last report is on nobody's books and not visible.
    loss: mean training loss of its last scan, in nats per token; None before
      the first heartbeat that holds one.
    tokens_per_second: that of its last heartbeat; 0 while it is absent.
    rates: the tokens per second of all heartbeats that had a scan to report.
    rounds_merged: rounds in which a contribution of it was merged.
    rounds_since_first: merged rounds of the run since its first admission.
    rounds_merged_since_return, rounds_since_return: both since its return,
      that is, its latest admission.
    staleness: of its merged contributions: versions between the base that the
      delta starts from and the version that it was merged into, so 0 if it
      starts from the newest.
    staleness_sum: sum of those.
    merged_tokens: for every merge of a contribution, its tokens / P.
    covered: token positions that merged contributions hold.
    weight_sum: sum over its merges of its weight / weight of all merged.
    refusals: refused contributions by reason.
    bytes_up: payload bytes received from it.
    bytes_down: payload bytes sent to it.
    traffic: the same by direction and purpose: 'up accepted', 'up refused',
      'down publications' and 'down values' (to a learner that joins, or missed
      a publication).
  """

  learner: int
  state: str = words.ABSENT
  incarnation: int = 0
  is_connected: bool = False
  restarts: int = 0
  last_seen: float | None = None
  lost_because: str = ''
  total_steps: int = 0
  total_tokens: int = 0
  processed_tokens: int = 0
  loss: float | None = None
  tokens_per_second: float = 0.0
  rates: Series = dataclasses.field(default_factory=Series)
  rounds_merged: int = 0
  rounds_since_first: int = 0
  rounds_merged_since_return: int = 0
  rounds_since_return: int = 0
  staleness: Series = dataclasses.field(default_factory=Series)
  staleness_sum: int = 0
  merged_tokens: float = 0.0
  covered: Intervals = dataclasses.field(default_factory=Intervals)
  weight_sum: float = 0.0
  refusals: Counter[str] = dataclasses.field(default_factory=Counter)
  bytes_up: int = 0
  bytes_down: int = 0
  traffic: Counter[str] = dataclasses.field(default_factory=Counter)
  _admitted_tokens: int = 0
  _has_reported: bool = False
  _lost_with_syncer: bool = False

  @property
  def participation(self) -> float | None:
    """Share of the merged rounds since its first admission with it in."""
    if not self.rounds_since_first:
      return None
    return self.rounds_merged / self.rounds_since_first

  @property
  def participation_since_return(self) -> float | None:
    """The same since its latest admission; it compiles in that time, too."""
    if not self.rounds_since_return:
      return None
    return self.rounds_merged_since_return / self.rounds_since_return

  @property
  def staleness_mean(self) -> float | None:
    """Mean staleness of its merged contributions, in versions."""
    if not self.staleness.count:
      return None
    return self.staleness_sum / self.staleness.count

  def admit(self, now: float, incarnation: int, total_tokens: int) -> bool:
    """It is in (again); returns whether that ends a fault of its own."""
    is_survived = self.incarnation > 0 and not self._lost_with_syncer
    self.restarts += is_survived
    self.state = words.JOINING
    self.incarnation = incarnation
    self.is_connected = True
    self.last_seen = now
    self.rounds_merged_since_return = self.rounds_since_return = 0
    self._admitted_tokens = total_tokens
    self._has_reported = False
    self._lost_with_syncer = False
    return is_survived

  def lose(self, reason: str, with_syncer: bool = False) -> None:
    """It is not reachable any more."""
    self.is_connected = False
    self.tokens_per_second = 0.0
    self.lost_because = reason
    self._lost_with_syncer = with_syncer
    if self.state != words.DONE:
      self.state = words.ABSENT

  def report(self, total_steps: int, total_tokens: int) -> None:
    """It says how far it has come.

    A contribution may come in later than a heartbeat that was sent after it, so
    less than before means nothing, but in the first report of an incarnation.
    """
    is_first, self._has_reported = not self._has_reported, True
    if is_first and total_tokens < self.total_tokens:
      self.processed_tokens += max(total_tokens - self._admitted_tokens, 0)
      self.total_steps, self.total_tokens = total_steps, total_tokens
      return
    self.processed_tokens += max(total_tokens - self.total_tokens, 0)
    self.total_steps = max(self.total_steps, total_steps)
    self.total_tokens = max(self.total_tokens, total_tokens)

  def count_round(
    self, share_of_weight: float | None, staleness: int, tokens: float
  ) -> None:
    """A round was merged: with this share of the weight, or None without it.

    Args:
      share_of_weight: its weight / weight of all; None if it is not in.
      staleness: of its contribution, in versions.
      tokens: of its contribution, already divided by P.
    """
    if self.incarnation:
      self.rounds_since_first += 1
      self.rounds_since_return += 1
    if share_of_weight is None:
      return
    self.rounds_merged += 1
    self.rounds_merged_since_return += 1
    self.weight_sum += share_of_weight
    self.staleness.add(staleness)
    self.staleness_sum += staleness
    self.merged_tokens += tokens
