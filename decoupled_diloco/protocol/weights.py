"""How much a contribution counts (arXiv 2604.21428, section on merging)."""

import dataclasses
from typing import TypeVar

Number = TypeVar('Number')


def contribution_weight(tokens: Number, steps: Number) -> Number:
  """Quantity times quality: `tokens * (tokens / steps)`.

  Quantity is how much a learner has read since it adopted the fragment, quality
  how large its batches were. Works on numbers and on arrays alike.

  >>> contribution_weight(100.0, 10.0)
  1000.0

  Args:
    tokens: tokens since the learner adopted the fragment.
    steps: inner steps since then; positive.
  """
  return tokens * (tokens / steps)  # pyright: ignore[reportOperatorIssue]


@dataclasses.dataclass(frozen=True, slots=True)
class StalenessOptions:
  """What becomes of a delta whose base is no longer the newest version.

  Attributes:
    staleness_discount: its weight is multiplied by this for every version.
    max_staleness: with more versions than this it is refused.
  """

  staleness_discount: float = 1.0
  max_staleness: int = 4

  def __post_init__(self):
    if not 0 < self.staleness_discount <= 1:
      raise ValueError(
        f'staleness_discount={self.staleness_discount} must be in (0, 1]; '
        '1 counts a stale contribution in full.'
      )
    if self.max_staleness < 0:
      raise ValueError(
        f'max_staleness={self.max_staleness} must not be negative; '
        '0 refuses every contribution whose base is not the newest version.'
      )

  def discounted(self, weight: float, staleness: int) -> float:
    """The weight of a contribution that is `staleness` versions old."""
    return weight * self.staleness_discount**staleness

  def objection(self, version: int, base_version: int) -> str | None:
    """Why a base is not acceptable; None if it is."""
    if base_version < 0:
      return f'base version {base_version} must not be negative'
    staleness = version - base_version
    if staleness < 0:
      return f'base version {base_version} is ahead of version {version}'
    if staleness > self.max_staleness:
      return (
        f'base version {base_version} is {staleness} versions old, '
        f'max_staleness={self.max_staleness}'
      )
    return None
