"""Goodput and yield: did the hardware train, and did the model get it?

Goodput is useful tokens / capacity, yield is merged tokens / processed tokens;
they are always shown together. A run in which every learner trains all the time
and nothing is ever merged has a goodput of 0; one in which everything is
merged, but only half of the learners were there, has a yield of 1 and a goodput
of 1/2.
"""

import statistics
from typing import NamedTuple

from decoupled_diloco.observe.run_status import RunStatus


class Account(NamedTuple):
  """What became of a run's hardware, in tokens.

  Attributes:
    useful_tokens: tokens that live on, all learners together.
    capacity_tokens: what the same hardware would have processed; None while no
      rate is known.
    merged_tokens: tokens that the global model got.
    processed_tokens: tokens that were trained on.
    goodput: useful / capacity; None while the capacity is 0 or unknown.
    yield_: merged / processed; None while nothing is processed.
  """

  useful_tokens: int
  capacity_tokens: float | None
  merged_tokens: float
  processed_tokens: int
  goodput: float | None
  yield_: float | None


def account(status: RunStatus) -> Account:
  """Goodput, yield and what they are made of, up to `status.now`."""
  useful = sum(useful_tokens(status, learner) for learner in status.learners)
  capacity = capacity_tokens(status)
  processed = status.processed_tokens
  return Account(
    useful_tokens=useful,
    capacity_tokens=capacity,
    merged_tokens=status.merged_tokens,
    processed_tokens=processed,
    goodput=useful / capacity if capacity else None,
    yield_=status.merged_tokens / processed if processed else None,
  )


def useful_tokens(status: RunStatus, learner: int) -> int:
  """How many of a learner's tokens live on.

  A contribution holds the positions (T - tokens, T] of its learner, T being its
  `total_tokens`. The useful ones are the union over the accepted contributions
  of any fragment that were merged or may still be: one fragment's merge is
  enough, and a position that was trained on twice counts once. Tokens of a scan
  whose contribution is not accepted yet are not useful yet.
  """
  waiting = [
    (max(entry.total_tokens - entry.tokens, 0), entry.total_tokens)
    for (_, number), entry in status.accepted.items()
    if number == learner
  ]
  return status.learners[learner].covered.total(waiting)


def undisturbed_rates(status: RunStatus) -> dict[int, float] | None:
  """Tokens per second of every learner in a scan; None if none is known.

  That of a learner is the median over its heartbeats, in which waiting is
  excluded; that of a learner of which none has come is the mean of the others.
  """
  known = {
    number: rate
    for number, learner in status.learners.items()
    if (rate := learner.rates.median) is not None
  }
  if not known:
    return None
  mean = statistics.fmean(known.values())
  return {number: known.get(number, mean) for number in status.learners}


def capacity_tokens(status: RunStatus) -> float | None:
  """What the same hardware would have processed, had nothing disturbed it.

  The sum over all M learners, there or not, of their undisturbed rate times
  the wall time, which is from the opening of round 0 to the beginning of the
  drain. The start-up and the drain are reported apart. (A scan that runs when
  the drain begins is still finished and counts as useful, so that a short run
  may gain up to a scan per learner.)
  """
  rates = undisturbed_rates(status)
  if rates is None:
    return None
  return sum(rates.values()) * status.wall_seconds
