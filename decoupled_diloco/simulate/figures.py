"""What a learner of a simulation has done."""

import dataclasses


@dataclasses.dataclass(slots=True)
class Figures:
  """What a learner has done, over all its lives.

  Attributes:
    scans: whole scans.
    scan_seconds: time that it spent in them.
    tokens: trained on in them.
    adopted: hand-overs of which it has adopted the merge.
    overlap_steps: inner steps between those hand-overs and adoptions, summed.
    overlap_seconds: the same in seconds.
  """

  scans: int = 0
  scan_seconds: float = 0.0
  tokens: int = 0
  adopted: int = 0
  overlap_steps: int = 0
  overlap_seconds: float = 0.0
