"""When enough learners have contributed for a round to go ahead.

The pace rule: round t gives way to round t+1 when K_min learners have
contributed to t *and* K_min have come back with t+1. So the K_min-th fastest
learner sets the pace, one round per scan of its own, whatever the latency, and
rounds cannot race ahead of the learners.

A learner that waits for the round's publication cannot come back before it, nor
can one whose only fragment is in flight (P = 1). Such a learner counts as come
back once a scan of its own had the time to be made since the round before had
its quorum; and as there is nothing to do for the next round meanwhile, that is
opened when the grace is over. So the pace is the same.

When every connected learner is in, there is nobody to wait for: the round ends
at once.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple


@dataclasses.dataclass(frozen=True, slots=True)
class QuorumOptions:
  """The quorum.

  Attributes:
    min_learners: K_min, the fewest contributions that may be merged.
  """

  min_learners: int = 1

  def __post_init__(self):
    if self.min_learners < 1:
      raise ValueError(
        f'min_learners={self.min_learners} must be at least 1; '
        'a round without a contribution has nothing to merge.'
      )


class QuorumDecision(NamedTuple):
  """Whether a round may go ahead, and why or why not.

  Attributes:
    is_reached: the round has its quorum; its grace begins.
    is_unanimous: every connected learner is in; the round ends at once.
    reason: a sentence for people.
  """

  is_reached: bool
  is_unanimous: bool
  reason: str


def decide(
  options: QuorumOptions,
  *,
  contributors: Collection[int],
  returned: Collection[int],
  expected: Collection[int],
) -> QuorumDecision:
  """Whether the current round has its quorum.

  Args:
    options: K_min.
    contributors: learners with a contribution to the round.
    returned: learners that have come back with the next one, or count as such.
    expected: connected learners that could still contribute, or have.
  """
  required = options.min_learners
  enough = len(set(contributors)) >= required
  is_unanimous = enough and set(expected) <= set(contributors)
  is_reached = enough and len(set(returned)) >= required
  if is_unanimous:
    reason = f'all {len(set(expected))} connected learners are in'
  elif not enough:
    reason = f'{len(set(contributors))} of {required} required learners'
  elif not is_reached:
    reason = (
      f'{len(set(returned))} of {required} required learners have come back '
      'with the next round'
    )
  else:
    reason = f'{len(set(contributors))} contributions, {required} required'
  return QuorumDecision(is_reached or is_unanimous, is_unanimous, reason)


def shortage(
  options: QuorumOptions,
  *,
  now: float,
  connected: Collection[int],
  last_seen: Mapping[int, float],
) -> str | None:
  """Why no round can go ahead at all, if too few learners are connected.

  >>> shortage(
  ...   QuorumOptions(3), now=9.0, connected=[0, 1], last_seen={2: 1.9}
  ... )
  '2 of 3 required learners; learner 2 last seen 7.1 s ago'
  """
  if len(connected) >= options.min_learners:
    return None
  absent = [
    f'learner {learner} last seen {now - seen:.1f} s ago'
    for learner, seen in sorted(last_seen.items())
    if learner not in connected
  ]
  start = f'{len(connected)} of {options.min_learners} required learners'
  return '; '.join([start, *absent])
