"""Which fragment a round exchanges, and where in the run a round lies."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleOptions:
  """How often fragments are exchanged.

  Attributes:
    sync_every: H, inner steps between two synchronisations of a fragment.
    num_fragments: P; one fragment is exchanged every K = H / P inner steps.
    tokens_per_step: tokens of all learners together in an inner step, if the
      run's global step follows from merged tokens; 0: it follows from rounds.
  """

  sync_every: int = 24
  num_fragments: int = 24
  tokens_per_step: int = 0

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
    if self.tokens_per_step < 0:
      raise ValueError(
        f'tokens_per_step={self.tokens_per_step} must not be negative; with 0 '
        'the global step is the round times K.'
      )

  @property
  def steps_per_scan(self) -> int:
    """K, the inner steps of one scan: the time between two rounds."""
    return self.sync_every // self.num_fragments

  def fragment_of(self, round_: int) -> int:
    """The fragment that this round exchanges."""
    return round_ % self.num_fragments

  def global_step_of(self, round_: int, merged_tokens: float) -> int:
    """The run's inner step at which the scan before this round begins.

    Args:
      round_: the round that the scan's hand-over is for.
      merged_tokens: tokens that the run has merged, as far as is known. Where
        contributions are lost, or learners come and go, a round is no measure
        of how far the run has come.
    """
    if self.tokens_per_step:
      return int(merged_tokens / self.tokens_per_step)
    return round_ * self.steps_per_scan
