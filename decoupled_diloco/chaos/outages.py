"""When learners were away, and how soon that was noticed: tape against clock.

What was injected, and when, is known from outside; what the syncer saw of it is
on its tape. Both have the clock of this machine.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from decoupled_diloco.chaos import schedule
from decoupled_diloco.chaos.injector import Struck
from decoupled_diloco.observe.tape import Tape
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg

Interval = tuple[float, float]

# How long after the end of a freeze its loss may still be noticed.
_LATE_SECONDS = 1.0


class Outage(NamedTuple):
  """A learner that could not train for a while.

  Attributes:
    learner: its number.
    kind: of the fault.
    began_at: when the fault struck, in seconds since training began.
    detected_at: when the syncer knew; None if it never did before the end.
    ended_at: when the learner was ready to train again; None if it never was.
  """

  learner: int
  kind: str
  began_at: float
  detected_at: float | None
  ended_at: float | None


class Availability(NamedTuple):
  """How much of their time learners could train.

  Attributes:
    share: of the learners' time together that they were neither dead nor
      frozen nor starting: a bound on goodput.
    uptime: the share of the time in which at least `min_learners` could.
  """

  share: float
  uptime: float


def outages(
  tape: Tape, struck: Iterable[Struck], opened_at: float
) -> list[Outage]:
  """The outages of a run, in the order in which they began.

  Cut and slow links are none: their learners train on.

  Args:
    tape: of the syncer.
    struck: what was injected.
    opened_at: when round 0 was opened, on the tape's clock.
  """
  sightings = _sightings(tape)
  zero = tape.segments[0].header.facts['began_at'] + opened_at
  found = []
  for each in struck:
    at = each.at - zero
    for m in each.learners:
      seen = [
        (when - opened_at, what)
        for when, learner, what in sightings
        if learner == m and when - opened_at >= at
      ]
      detected_at = next((when for when, _ in seen), None)
      match each.fault.kind:
        case schedule.KILL | schedule.SITE:
          ready = (when for when, what in seen if what == 'ready')
          ended_at = next(ready, None)
        case schedule.FREEZE:
          ended_at = at + each.fault.seconds
          # It may be over before anybody has noticed.
          if detected_at is not None and detected_at > ended_at + _LATE_SECONDS:
            detected_at = None
        case _:
          continue
      found.append(Outage(m, each.fault.kind, at, detected_at, ended_at))
  return sorted(found, key=lambda outage: outage.began_at)


def availability(
  found: Iterable[Outage],
  num_learners: int,
  min_learners: int,
  wall_seconds: float,
) -> Availability:
  """How much of the time, from 0 to `wall_seconds`, learners could train."""
  away: list[list[Interval]] = [[] for _ in range(num_learners)]
  for outage in found:
    end = wall_seconds if outage.ended_at is None else outage.ended_at
    start, end = max(outage.began_at, 0.0), min(end, wall_seconds)
    if start < end:
      away[outage.learner].append((start, end))
  merged = [_union(intervals) for intervals in away]
  lost = sum(end - start for each in merged for start, end in each)
  changes = sorted(
    change
    for each in merged
    for start, end in each
    for change in ((start, 1), (end, -1))
  )
  down, num_away, since = 0.0, 0, 0.0
  for at, change in changes:
    if num_learners - num_away < min_learners:
      down += at - since
    num_away, since = num_away + change, at
  return Availability(
    share=1.0 - lost / (num_learners * wall_seconds),
    uptime=1.0 - down / wall_seconds,
  )


def median_seconds(times: Iterable[float | None]) -> float | None:
  """The median of those that are known; None if none is."""
  known = [time for time in times if time is not None]
  return statistics.median(known) if known else None


def _sightings(tape: Tape) -> list[tuple[float, int, str]]:
  """What the syncer saw of its learners: when, which, and 'lost' or 'ready'."""
  found = []
  for event, effects in tape.steps:
    match event:
      case ev.ConnectionLost(learner=m):
        found.append((event.now, m, 'lost'))
      case ev.MessageArrived(message=msg.Ready(learner=m)):
        found.append((event.now, m, 'ready'))
    for effect in effects:
      match effect:
        case fx.Disconnect(learner=m):
          found.append((event.now, m, 'lost'))
        # Whoever dies while there is no syncer is noticed when it comes back.
        case fx.Send(message=msg.Welcome(learner=m)):
          found.append((event.now, m, 'back'))
  return found


def _union(intervals: Sequence[Interval]) -> list[Interval]:
  found: list[Interval] = []
  for start, end in sorted(intervals):
    if found and start <= found[-1][1]:
      found[-1] = (found[-1][0], max(found[-1][1], end))
    else:
      found.append((start, end))
  return found
