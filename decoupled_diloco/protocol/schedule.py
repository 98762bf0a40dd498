"""Which fragment a round exchanges, and where in the run a round lies."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleOptions:
  """How often fragments are exchanged.

  Attributes:
    sync_every: H, inner steps between two synchronisations of a fragment.
    num_fragments: P; one fragment is exchanged every K = H / P inner steps.
  """

  sync_every: int = 24
  num_fragments: int = 24

  def __post_init__(self):
    if self.num_fragments < 1:
      raise ValueError(
        f'num_fragments={self.num_fragments} must be at least 1; '
        'with 1 the whole model is exchanged at once, as in DiLoCo.'
      )
    if self.sync_every < 1 or self.sync_every % self.num_fragments:
      below = self.sync_every // self.num_fragments * self.num_fragments
      nearest = [
        str(value)
        for value in (below, below + self.num_fragments)
        if value >= self.num_fragments
      ]
      raise ValueError(
        f'sync_every={self.sync_every} must be a positive multiple of '
        f'num_fragments={self.num_fragments}; nearest: {", ".join(nearest)}.'
      )

  @property
  def steps_per_scan(self) -> int:
    """K, the inner steps of one scan: the time between two rounds."""
    return self.sync_every // self.num_fragments

  def fragment_of(self, round_: int) -> int:
    """The fragment that this round exchanges."""
    return round_ % self.num_fragments

  def global_step_of(self, round_: int) -> int:
    """The run's inner step at which the scan before this round begins."""
    return round_ * self.steps_per_scan
