"""A round's life: open, grace, merging; after its publication it is forgotten.

The protocol keeps only rounds that can still change something. A round older
than the current one that is not kept any more is closed, and what comes for it
is late.
"""

import enum
from collections.abc import Mapping
from typing import NamedTuple

from decoupled_diloco.protocol.effects import Share
from decoupled_diloco.protocol.messages import Contribution, Reason
from decoupled_diloco.protocol.weights import (
  StalenessOptions,
  contribution_weight,
)


class Stage(enum.StrEnum):
  """Where a round stands."""

  OPEN = 'open'  # No quorum yet.
  GRACE = 'grace'  # The quorum is there, more contributions are welcome.
  CLOSED = 'closed'  # Waits for the merge of an older round of its fragment.
  MERGING = 'merging'  # The shell merges it and makes it durable.


class Round(NamedTuple):
  """One synchronisation of one fragment.

  Attributes:
    stage: where it stands.
    entries: the accepted contributions, one per learner, as they came.
    arrivals: when each of them came.
    quorum_at: when its grace began.
    deadline: when the grace ends.
    closed_at: when the last could come.
  """

  number: int
  fragment: int
  stage: Stage = Stage.OPEN
  entries: tuple[Contribution, ...] = ()
  arrivals: tuple[float, ...] = ()
  quorum_at: float = 0.0
  deadline: float = 0.0
  closed_at: float = 0.0

  @property
  def contributors(self) -> frozenset[int]:
    """The learners that are in."""
    return frozenset(entry.learner for entry in self.entries)

  def with_entry(self, now: float, entry: Contribution) -> 'Round':
    """The round with one more contribution."""
    return self._replace(
      entries=(*self.entries, entry), arrivals=(*self.arrivals, now)
    )

  def without(self, learner: int) -> 'Round':
    """The round as if nothing had come from this learner."""
    kept = [
      (entry, arrival)
      for entry, arrival in zip(self.entries, self.arrivals, strict=True)
      if entry.learner != learner
    ]
    return self._replace(
      entries=tuple(entry for entry, _ in kept),
      arrivals=tuple(arrival for _, arrival in kept),
    )

  def quorum_seconds(self, min_learners: int) -> float:
    """Time from the first contribution to the one that made the quorum."""
    return self.arrivals[min_learners - 1] - self.arrivals[0]

  def shares(
    self, options: StalenessOptions, version: int
  ) -> tuple[tuple[Share, ...], tuple[tuple[Contribution, str], ...]]:
    """Who is merged, with which weight, and who has become too stale.

    Args:
      options: staleness discount and limit.
      version: the fragment's version before the merge.

    Returns:
      The shares in the order of the learners' numbers, so that the sum does not
      depend on the order of arrival; and the others with the objection.
    """
    shares, stale = [], []
    for entry in sorted(self.entries, key=lambda entry: entry.learner):
      objection = options.objection(version, entry.base_version)
      if objection:
        stale.append((entry, objection))
        continue
      weight = options.discounted(
        contribution_weight(float(entry.tokens), float(entry.steps)),
        version - entry.base_version,
      )
      shares.append(Share(entry.learner, weight))
    return tuple(shares), tuple(stale)


def returned(rounds: Mapping[int, Round], number: int) -> frozenset[int]:
  """The learners that have come back after a round: they are in a later one."""
  return frozenset(
    learner
    for round_ in rounds.values()
    if round_.number > number
    for learner in round_.contributors
  )


def return_times(
  round_: Round, *, paced_at: float, steps_per_scan: int, num_fragments: int
) -> Mapping[int, float]:
  """When those count as come back that cannot come back before its publication.

  They wait for it, or the next round is of the same fragment (P = 1) and they
  have handed that over. They count when a scan of theirs had the time to be
  made since the round before had its quorum. Without that delay, each learner
  that comes by would end a round, and M learners would make M rounds per scan.

  Args:
    round_: the current one.
    paced_at: when the round before had its quorum.
    steps_per_scan: K.
    num_fragments: P.

  Returns:
    By learner, the time from which on it counts.
  """
  return {
    entry.learner: paced_at + steps_per_scan * entry.step_seconds
    for entry in round_.entries
    if entry.is_waiting or num_fragments == 1
  }


def timing_objection(
  rounds: Mapping[int, Round],
  entry: Contribution,
  *,
  current: int,
  merged: int,
  newest_allowed: int,
) -> tuple[Reason, str] | None:
  """Why a contribution comes at the wrong time, or twice; None if neither.

  Args:
    rounds: those that are kept.
    entry: the contribution.
    current: the current round; in the drain, its first one.
    merged: the newest round of this fragment that was merged.
    newest_allowed: the newest round that a learner may propose.
  """
  if entry.round < 0:
    return Reason.UNKNOWN_ROUND, f'round {entry.round} must not be negative'
  if entry.round > newest_allowed:
    return (
      Reason.UNKNOWN_ROUND,
      f'round {entry.round} is ahead of {newest_allowed}, the last one that '
      f'can be proposed while round {current} is open',
    )
  round_ = rounds.get(entry.round)
  if round_ is None and (entry.round < current or entry.round <= merged):
    return Reason.LATE, f'round {entry.round} is over, {current} is open'
  if round_ is not None:
    if entry.learner in round_.contributors:
      return (
        Reason.DUPLICATE,
        f'learner {entry.learner} is in round {entry.round} already',
      )
    if round_.stage in (Stage.CLOSED, Stage.MERGING):
      return Reason.LATE, f'round {entry.round} is being merged'
  return None
