"""What a run under faults came to."""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class ChaosResult:
  """What a run under faults came to.

  Attributes:
    is_complete: whether the run met its budget and nothing failed.
    end_reason: why it ended, in words.
    held_out_loss: of the global model, in nats per token; None if it was not
      measured.
    merged_tokens: that the global model got.
    wall_seconds: from the opening of round 0 to the beginning of the drain.
    goodput, yield_: see `observe.goodput`; None if they are not known.
    participation: mean over the learners; None if no round was merged.
    available: the share of the learners' time that they were neither dead nor
      frozen nor starting; None of a baseline, which has no learners.
    uptime: the share of the time in which at least K_min could train; of a
      baseline, in which steps were taken.
    faults: how many befell somebody, by kind.
    faults_in_vain: how many came when their learner was dead already.
    detect_seconds: median time from a kill until the syncer knew.
    rejoin_seconds: median time from a kill until the learner was ready again;
      of a baseline, until the next step was done.
    crashes: processes that ended by themselves, though they should not have.
    lives: of the syncer, or of all processes of a baseline.
    refusals: refused contributions, by reason.
    memory_growth: of each process that was there in the whole second half, by
      how much its memory grew in it, relative to before.
    problems: what an audit of the tape found wrong.
  """

  is_complete: bool
  end_reason: str
  held_out_loss: float | None
  merged_tokens: float
  wall_seconds: float
  goodput: float | None
  yield_: float | None
  participation: float | None
  available: float | None
  uptime: float
  faults: Mapping[str, int]
  faults_in_vain: int
  detect_seconds: float | None
  rejoin_seconds: float | None
  crashes: Sequence[str]
  lives: int
  refusals: Mapping[str, int]
  memory_growth: Mapping[str, float]
  problems: Sequence[str]

  @property
  def goodput_of_available(self) -> float | None:
    """Goodput relative to what the faults left."""
    if self.goodput is None or not self.available:
      return None
    return self.goodput / self.available
