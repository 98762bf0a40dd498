"""Learners that are slower than their hardware, to stand for other ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ThrottleOptions:
  """A learner that stands for slower or busier hardware than it runs on.

  Attributes:
    step_seconds: an inner step takes at least so long; 0 for as fast as it
      goes.
  """

  step_seconds: float = 0.0

  def __post_init__(self):
    if self.step_seconds < 0:
      raise ValueError(
        f'step_seconds={self.step_seconds} must not be negative; 0: no pacing.'
      )
