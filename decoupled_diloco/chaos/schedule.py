"""Which faults befall whom, and when: drawn once from a seed.

The same faults then strike a decoupled run and its baseline, each at the same
moment after its training has begun.
"""

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from decoupled_diloco.runtime.launch_options import SYNCER

KILL = 'kill'
FREEZE = 'freeze'
PARTITION = 'partition'
SLOW = 'slow'
CORRUPT = 'corrupt'
SITE = 'site'
KINDS = (KILL, FREEZE, PARTITION, SLOW, CORRUPT, SITE, SYNCER)
# Those that last for a while.
_LASTING = (FREEZE, PARTITION, SLOW)


class Fault(NamedTuple):
  """Something bad that is done on purpose.

  Attributes:
    at_seconds: when, since training has begun.
    kind: one of `KINDS`: 'kill' (SIGKILL), 'freeze' (SIGSTOP, and SIGCONT
      after a while), 'partition' (nothing gets through the link), 'slow' (the
      link has little bandwidth), 'corrupt' (a bit on the link is flipped),
      'site' (SIGKILL for all learners of a site at once), 'syncer' (SIGKILL).
    learners: whom it befalls; empty for the syncer.
    seconds: how long it lasts; 0 if it is over at once.
  """

  at_seconds: float
  kind: str
  learners: tuple[int, ...]
  seconds: float = 0.0

  def __str__(self) -> str:
    if self.kind == SYNCER:
      return 'kills the syncer'
    who = ', '.join(map(str, self.learners))
    who = f'learner{"s" * (len(self.learners) > 1)} {who}'
    lasting = f' for {self.seconds:.1f} s'
    return {
      KILL: f'kills {who}',
      SITE: f'kills a site: {who}',
      FREEZE: f'freezes {who}{lasting}',
      PARTITION: f'cuts {who} off{lasting}',
      SLOW: f'slows the link of {who} down{lasting}',
      CORRUPT: f'flips a bit on the link of {who}',
    }[self.kind]


@dataclasses.dataclass(frozen=True)
class FaultOptions:
  """How often which faults strike.

  Attributes:
    seed: of all that is drawn.
    mean_seconds_between: mean time between two faults, whomever they befall;
      the times are those of a Poisson process. 0: only those of `schedule`.
    weights: by kind, how likely it is among those that are drawn, relative to
      the others; kinds that are left out do not occur.
    mean_seconds: by kind, how long a fault of it lasts in the mean, for those
      that last; exponentially distributed.
    sites: for 'site', which learners are at one place; for example
      ((0, 1), (2, 3)).
    spare: who is not killed from which second on, as ((learner or 'syncer',
      second), ...); what is drawn and would kill them is left out.
    max_faults: how many are drawn; 0 for no limit.
    schedule: faults that are not drawn, as ((second, kind, learners, seconds),
      ...); for example ((30.0, 'partition', (2,), 5.0), ).
  """

  seed: int = 0
  mean_seconds_between: float = 10.0
  weights: Mapping[str, float] = dataclasses.field(
    default_factory=lambda: {KILL: 1.0}
  )
  mean_seconds: Mapping[str, float] = dataclasses.field(
    default_factory=lambda: {FREEZE: 3.0, PARTITION: 5.0, SLOW: 5.0}
  )
  sites: tuple[tuple[int, ...], ...] = ()
  spare: tuple[tuple[int | str, float], ...] = ()
  max_faults: int = 0
  schedule: tuple[tuple[float, str, tuple[int, ...], float], ...] = ()

  def __post_init__(self):
    """Checks all values.

    Raises:
      ValueError: with the field, the rule, the value and what to do.
    """
    if self.mean_seconds_between < 0 or self.max_faults < 0:
      raise ValueError(
        f'mean_seconds_between={self.mean_seconds_between} and max_faults='
        f'{self.max_faults} must not be negative; 0 for none drawn, and for '
        'no limit.'
      )
    for name, values in (
      ('weights', self.weights),
      ('mean_seconds', self.mean_seconds),
    ):
      _check_kinds(name, values)
    if self.mean_seconds_between and not any(self.weights.values()):
      raise ValueError(
        f'weights={dict(self.weights)} must have a kind with a positive '
        "weight; for example {'kill': 1.0}, or set mean_seconds_between=0."
      )
    if self.weights.get(SITE) and not self.sites:
      raise ValueError(
        "weights has the kind 'site', and sites=() names none; for example "
        'sites=((0, 1), (2, 3)).'
      )
    object.__setattr__(self, 'schedule', _as_schedule(self.schedule))
    object.__setattr__(self, 'spare', _as_spare(self.spare))

  def check_learners(self, num_learners: int) -> None:
    """Checks that the options speak of learners that there are.

    Raises:
      ValueError: if they do not.
    """
    named = {
      *(m for site in self.sites for m in site),
      *(m for _, _, learners, _ in self.schedule for m in learners),
      *(whom for whom, _ in self.spare if isinstance(whom, int)),
    }
    if wrong := sorted(m for m in named if not 0 <= m < num_learners):
      raise ValueError(
        f'sites, schedule and spare name learner {wrong[0]}; name one of 0 to '
        f'{num_learners - 1}.'
      )
    if self.mean_seconds_between and not self._leaves_somebody(num_learners):
      raise ValueError(
        f'spare={self.spare} leaves nobody whom a fault of weights='
        f'{dict(self.weights)} could befall; spare fewer, add a kind, or set '
        'mean_seconds_between=0.'
      )

  def _leaves_somebody(self, num_learners: int) -> bool:
    """Whether faults are drawn for ever, whoever is spared."""
    victims = {
      KILL: [(m,) for m in range(num_learners)],
      SITE: self.sites,
      SYNCER: [()],
    }
    return any(
      not _is_spared(self, Fault(math.inf, kind, tuple(learners)))
      for kind, weight in self.weights.items()
      if weight
      for learners in victims.get(kind, [(0,)])
    )


def faults(options: FaultOptions, num_learners: int) -> Iterator[Fault]:
  """All faults in the order of their times; without end if some are drawn.

  Args:
    options: see there.
    num_learners: M.
  """
  fixed = sorted(Fault(*fault) for fault in options.schedule)
  for drawn in _drawn(options, num_learners):
    while fixed and fixed[0].at_seconds <= drawn.at_seconds:
      yield fixed.pop(0)
    yield drawn
  yield from fixed


def _drawn(options: FaultOptions, num_learners: int) -> Iterator[Fault]:
  if not options.mean_seconds_between:
    return
  dice = random.Random(f'{options.seed} faults')
  kinds = [kind for kind in KINDS if options.weights.get(kind)]
  weights = [options.weights[kind] for kind in kinds]
  at_seconds, count = 0.0, 0
  while not options.max_faults or count < options.max_faults:
    at_seconds += options.mean_seconds_between * dice.expovariate(1.0)
    [kind] = dice.choices(kinds, weights)
    learner = dice.randrange(num_learners)
    site = dice.choice(options.sites or ((learner,),))
    duration = dice.expovariate(1.0)
    fault = Fault(
      at_seconds,
      kind,
      {SYNCER: (), SITE: tuple(site)}.get(kind, (learner,)),
      options.mean_seconds.get(kind, 0.0) * duration,
    )
    if not _is_spared(options, fault):
      count += 1
      yield fault


def _is_spared(options: FaultOptions, fault: Fault) -> bool:
  if fault.kind not in (KILL, SITE, SYNCER):
    return False
  whom = {SYNCER} if fault.kind == SYNCER else set(fault.learners)
  return any(
    other in whom and fault.at_seconds >= second
    for other, second in options.spare
  )


def _check_kinds(name: str, values: Mapping[str, float]) -> None:
  allowed = KINDS if name == 'weights' else _LASTING
  for kind, value in values.items():
    if kind not in allowed:
      raise ValueError(
        f'{name} has the kind {kind!r}; it must be one of {", ".join(allowed)}.'
      )
    if value < 0:
      raise ValueError(f'{name}[{kind!r}]={value} must not be negative.')


def _as_schedule(value: Any) -> tuple[Fault, ...]:
  """Faults from whatever a config gives."""
  rule = (
    f'schedule={value!r} must be faults (second, kind, learners, seconds); for '
    "example ((30.0, 'partition', (2,), 5.0), (60.0, 'syncer', (), 0.0))."
  )
  found = []
  try:
    for at_seconds, kind, learners, seconds in value:
      found.append(
        Fault(
          float(at_seconds),
          kind,
          tuple(int(m) for m in learners),
          float(seconds),
        )
      )
  except (TypeError, ValueError):
    raise ValueError(rule) from None
  for fault in found:
    is_right = fault.at_seconds >= 0 and fault.seconds >= 0
    names = (fault.kind == SYNCER) == (not fault.learners)
    if fault.kind not in KINDS or not is_right or not names:
      raise ValueError(rule)
  return tuple(found)


def _as_spare(value: Any) -> tuple[tuple[int | str, float], ...]:
  try:
    found = tuple(
      (SYNCER if whom == SYNCER else int(whom), float(second))
      for whom, second in value
    )
  except (TypeError, ValueError):
    raise ValueError(
      f"spare={value!r} must be pairs of a learner, or 'syncer', and a second; "
      "for example ((0, 0.0), ('syncer', 600.0))."
    ) from None
  return found
