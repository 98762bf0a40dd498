"""How a run ended."""

import dataclasses

from decoupled_diloco import stopping


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run ended, as the syncer's process leaves it in `result.json`.

  Attributes:
    reason: why it ended, in words.
    has_met_budget: whether it ended by itself.
    is_finite: whether all global parameters are.
    checkpoint: path of the final one; '' if it could not be saved.
    failure: what has gone wrong at the end, as a sentence; '' if nothing has.
    stopped_by: number of the signal that was received; 0 if none was.
    loss_start, loss_end, sample: see `measuring.Measures`.
  """

  reason: str
  has_met_budget: bool
  is_finite: bool
  checkpoint: str = ''
  failure: str = ''
  stopped_by: int = 0
  loss_start: float | None = None
  loss_end: float | None = None
  sample: str = ''

  @property
  def is_success(self) -> bool:
    """Whether the run came to its planned end, and nothing failed."""
    return self.has_met_budget and self.is_finite and not self.failure

  @property
  def exit_code(self) -> int:
    """Of the process."""
    if self.stopped_by and not self.failure:
      return stopping.exit_code(self.stopped_by)
    return 0 if self.is_success else 1
