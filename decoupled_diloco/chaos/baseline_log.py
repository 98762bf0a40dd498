"""What happens to the synchronous baseline, noted as it goes on."""

import dataclasses


@dataclasses.dataclass
class BaselineLog:
  """What happened to a baseline, as it goes on.

  Attributes:
    began_at: when the first step was done; None before.
    ended_at: when the time was over, all steps were done, or it was stopped.
    step: that training has come to, or will go on from.
    num_processed: steps that were done, those that were lost included.
    generations: how often all processes were started.
    deaths: of processes that ended the job.
    restarts: seconds from each death to the first step after it.
    starts: seconds of each phase, of each start but the first.
    trained_seconds: with a step at least every so often.
    step_times: seconds of each step, but for the first after a start.
    checkpoint_costs: seconds that each checkpoint took.
    checkpoint_intervals: seconds until the next one, as each one left them.
    is_done: whether all steps were done.
  """

  began_at: float | None = None
  ended_at: float | None = None
  step: int = 0
  num_processed: int = 0
  generations: int = 0
  deaths: int = 0
  restarts: list[float] = dataclasses.field(default_factory=list)
  starts: list[dict[str, float]] = dataclasses.field(default_factory=list)
  trained_seconds: float = 0.0
  step_times: list[float] = dataclasses.field(default_factory=list)
  checkpoint_costs: list[float] = dataclasses.field(default_factory=list)
  checkpoint_intervals: list[float] = dataclasses.field(default_factory=list)
  is_done: bool = False
