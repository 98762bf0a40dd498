"""What happens to the contributions of a round, as a user configures it."""

import dataclasses
import math

import optax

from decoupled_diloco.ops.merge import check_rule
from decoupled_diloco.ops.outer import from_gain, suited_gain, suited_momentum


@dataclasses.dataclass(frozen=True)
class OuterOptions:
  """What happens to the contributions of a round.

  Attributes:
    gain: how far a persistent delta moves the parameters in the end,
      learning_rate / (1 - momentum); None: `ops.outer.suited_gain`.
    momentum: of `outer_optimizer`; None: `ops.outer.suited_momentum`.
    nesterov: of `outer_optimizer`.
    merge: 'rda' or 'mean'.
    embedding_merge: the same for embeddings; 'mean' as published.
  """

  gain: float | None = None
  momentum: float | None = None
  nesterov: bool = True
  merge: str = 'rda'
  embedding_merge: str = 'mean'

  def __post_init__(self):
    if self.gain is not None and not math.isfinite(self.gain):
      raise ValueError(f'gain={self.gain} must be finite; 2 to 3 is usual.')
    self.optimizer(outer_steps=100.0)
    check_rule(self.merge)
    check_rule(self.embedding_merge, 'embedding_merge')

  def optimizer(self, outer_steps: float) -> optax.GradientTransformation:
    """The outer optimizer of a run with so many outer steps per fragment."""
    momentum = self.momentum
    if momentum is None:
      momentum = suited_momentum(outer_steps)
    gain = suited_gain(momentum) if self.gain is None else self.gain
    return from_gain(gain, momentum, self.nesterov)
