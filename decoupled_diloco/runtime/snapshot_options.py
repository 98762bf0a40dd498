"""When a learner takes snapshots."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SnapshotOptions:
  """When a learner takes snapshots.

  Attributes:
    every_seconds: time between two; one more is taken when the learner is asked
      to stop. 0 for none at all.
  """

  every_seconds: float = 60.0

  def __post_init__(self):
    if not self.every_seconds >= 0:
      raise ValueError(
        f'every_seconds={self.every_seconds} must not be negative; 0 for no '
        'snapshots.'
      )
