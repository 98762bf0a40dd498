"""Whether a delta is so large that it would wreck the fragment it is merged in.

A learner whose hardware or data has gone wrong may hand over a delta that is
finite and yet a thousand times too large. It is told from a healthy one by the
norms that were accepted before, for the same fragment, from whichever learner:
it must exceed `factor` times their median *as a whole and per inner step*. The
norm of a healthy delta grows with the number of steps in it, at least with
their square root (noise) and at most in proportion (drift). So neither a
learner that gathered many steps, because it is slow or because rounds had to
wait, nor one that has just adopted and gathered few, is taken for a sick one.
And nothing is refused for its size before a fragment has had a few versions:
while the learning rate warms up, the second deltas of all learners may be a
hundred times the first.

A learner whose contributions are refused several times in a row, as outliers,
as not finite or for their length, is quarantined: its connection is closed and
it is told why. It stays away until another process takes its number.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from decoupled_diloco.protocol.messages import Reason

# What says that a learner's arithmetic, not its link or its timing, is wrong.
UNSOUND = frozenset((Reason.OUTLIER, Reason.NOT_FINITE, Reason.WRONG_LAYOUT))


@dataclasses.dataclass(frozen=True, slots=True)
class OutlierOptions:
  """When a delta is refused for its size, and when its learner is sent away.

  Attributes:
    norm_factor: a norm of more than so many medians is refused; infinity
      refuses none.
    window: the median is taken over the contributions that were accepted while
      the fragment had its last so many versions.
    min_versions: nothing is refused for its size before contributions were
      accepted in so many of these versions.
    max_refusals: so many unsound contributions in a row quarantine a learner;
      0 quarantines nobody.
  """

  norm_factor: float = 10.0
  window: int = 8
  min_versions: int = 4
  max_refusals: int = 5

  def __post_init__(self):
    if not self.norm_factor > 1:
      raise ValueError(
        f'norm_factor={self.norm_factor} must be greater than 1: every other '
        'norm is above the median; inf refuses none for its size.'
      )
    if not 1 <= self.min_versions <= self.window:
      raise ValueError(
        f'min_versions={self.min_versions} must be at least 1 and at most '
        f'window={self.window}.'
      )
    if self.max_refusals < 0:
      raise ValueError(
        f'max_refusals={self.max_refusals} must not be negative; 0 quarantines '
        'nobody.'
      )


class Sample(NamedTuple):
  """What counts of a contribution.

  Attributes:
    version: of its fragment, when it came.
    steps: the inner steps in it; positive.
    norm: Euclidean norm of its delta.
  """

  version: int
  steps: int
  norm: float


class OutlierState(NamedTuple):
  """What is remembered.

  Attributes:
    accepted: per fragment, the samples of its last versions, oldest first.
  """

  accepted: Mapping[int, tuple[Sample, ...]]


class OutlierGuard(NamedTuple):
  """A policy, in the manner of an optax transformation.

  Attributes:
    init: gives the first state.
    update: `(state, fragment, sample) -> (state, objection)`; the objection is
      a sentence, or None if the sample is acceptable and was taken in.
  """

  init: Callable[[], OutlierState]
  update: Callable[[OutlierState, int, Sample], tuple[OutlierState, str | None]]


def outlier_guard(options: OutlierOptions) -> OutlierGuard:
  """The policy of these options.

  >>> guard = outlier_guard(OutlierOptions(min_versions=1))
  >>> state, objection = guard.update(guard.init(), 0, Sample(0, 24, 1.0))
  >>> guard.update(state, 0, Sample(1, 24, 50.0))[1]
  'norm 50 in 24 steps is more than 10 x the median 1 of the last 1 accepted'
  """

  def init() -> OutlierState:
    return OutlierState(accepted={})

  def update(
    state: OutlierState, fragment: int, sample: Sample
  ) -> tuple[OutlierState, str | None]:
    accepted = state.accepted.get(fragment, ())
    objection = _objection(options, accepted, sample)
    if objection:
      return state, objection
    oldest = sample.version - options.window
    accepted = tuple(old for old in accepted if old.version > oldest)
    return (
      OutlierState({**state.accepted, fragment: (*accepted, sample)}),
      None,
    )

  return OutlierGuard(init, update)


def _objection(
  options: OutlierOptions, accepted: tuple[Sample, ...], sample: Sample
) -> str | None:
  if len({old.version for old in accepted}) < options.min_versions:
    return None
  typical = statistics.median(old.norm for old in accepted)
  per_step = statistics.median(old.norm / old.steps for old in accepted)
  # Where nothing has moved yet, as before a warm-up, nothing is typical.
  if not typical or not per_step:
    return None
  if (
    sample.norm <= options.norm_factor * typical
    or sample.norm / sample.steps <= options.norm_factor * per_step
  ):
    return None
  return (
    f'norm {sample.norm:.3g} in {sample.steps} steps is more than '
    f'{options.norm_factor:g} x the median {typical:.3g} of the last '
    f'{len(accepted)} accepted'
  )
