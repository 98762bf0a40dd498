"""What a run came to: the figures that are shown, and kept, at its end."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from decoupled_diloco.observe import words
from decoupled_diloco.observe.goodput import account, useful_tokens
from decoupled_diloco.observe.run_status import RunStatus


@dataclasses.dataclass(frozen=True, slots=True)
class OutsideFacts:
  """What the tape cannot tell.

  Attributes:
    held_out_loss_start, held_out_loss_end: of the global model on held-out
      data, before round 0 and after the drain, in nats per token; None if it
      was not measured.
    checkpoint, tape, metrics: where they lie; '' if there is none.
    sample: text that the final global model has written; '' if there is none.
    end_reason: why the process ended; '' if the tape says it.
    is_failure: whether it ended because something went wrong; None if the tape
      says it.
  """

  held_out_loss_start: float | None = None
  held_out_loss_end: float | None = None
  checkpoint: str = ''
  tape: str = ''
  metrics: str = ''
  sample: str = ''
  end_reason: str = ''
  is_failure: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LearnerSummary:
  """One learner's part; see `LearnerStatus` for what the figures mean.

  Attributes:
    is_absent: whether it was lost, or never came, and was not there at the
      end.
    absent_because: how it was lost; '' if it never came or is not missing.
    tokens_per_second: median over its scans; None if no scan was reported.
    participation_since_return: since its return; None if it never was away.
    staleness_mean: in versions.
    weight_share: its mean share of the weight over all merged rounds.
  """

  learner: int
  is_absent: bool
  absent_because: str
  restarts: int
  steps: int
  processed_tokens: int
  useful_tokens: int
  merged_tokens: float
  tokens_per_second: float | None
  loss: float | None
  participation: float | None
  participation_since_return: float | None
  rounds_merged: int
  staleness_mean: float | None
  weight_share: float | None
  refusals: Mapping[str, int]
  bytes_up: int
  bytes_down: int
  traffic: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class FaultSummary:
  """A fault that the run has survived.

  Attributes:
    at_seconds: when all were there again, since the first event.
    learner: who was lost; None: the syncer.
    seconds_away: from the last sign of life to the return.
    reason: as the syncer saw it.
    is_new_process: whether a new process came back, and not only a connection.
  """

  at_seconds: float
  learner: int | None
  seconds_away: float
  reason: str
  is_new_process: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
  """A run at its end; see `RunStatus` and `Account` for the figures.

  Attributes:
    is_complete: whether the run came to its planned end and nothing failed.
    goodput, yield_: `yield_` is called 'yield' in JSON.
    wall_seconds: from the opening of round 0 to the beginning of the drain.
    bits_up, bits_down: bits per parameter and synchronisation.
    facts: what was given from outside.
  """

  run_id: str
  is_complete: bool
  end_reason: str
  goodput: float | None
  yield_: float | None
  useful_tokens: int
  capacity_tokens: float | None
  merged_tokens: float
  processed_tokens: int
  rounds_merged: int
  startup_seconds: float | None
  wall_seconds: float
  drain_seconds: float
  quorum_seconds_median: float | None
  grace_seconds_median: float | None
  bits_up: float | None
  bits_down: float | None
  bytes_up: int
  bytes_down: int
  faults: tuple[FaultSummary, ...]
  refusals: Mapping[str, int]
  rejections: int
  learners: tuple[LearnerSummary, ...]
  facts: OutsideFacts

  def to_jsonable(self) -> dict[str, Any]:
    """The summary as a JSON object; what is not finite becomes null."""
    value = _jsonable(dataclasses.asdict(self))
    value['yield'] = value.pop('yield_')
    return value


def summarise(
  status: RunStatus, facts: OutsideFacts = OutsideFacts()
) -> Summary:
  """Sums up a run, at its end or wherever it was broken off."""
  books = account(status)
  is_failure = (
    status.is_failure if facts.is_failure is None else facts.is_failure
  )
  began_at = status.began_at or 0.0
  return Summary(
    run_id=status.run_id,
    is_complete=status.ended_at is not None and not is_failure,
    end_reason=facts.end_reason or status.end_reason,
    goodput=books.goodput,
    yield_=books.yield_,
    useful_tokens=books.useful_tokens,
    capacity_tokens=books.capacity_tokens,
    merged_tokens=books.merged_tokens,
    processed_tokens=books.processed_tokens,
    rounds_merged=status.rounds_merged,
    startup_seconds=status.startup_seconds,
    wall_seconds=status.wall_seconds,
    drain_seconds=status.drain_seconds,
    quorum_seconds_median=status.quorum_seconds.median,
    grace_seconds_median=status.grace_seconds.median,
    bits_up=status.bits_up,
    bits_down=status.bits_down,
    bytes_up=status.bytes_up,
    bytes_down=status.bytes_down,
    faults=tuple(
      FaultSummary(fault.at - began_at, *fault[1:]) for fault in status.faults
    ),
    refusals=dict(sorted(status.refusals.items())),
    rejections=status.rejections,
    learners=tuple(
      LearnerSummary(
        learner=learner.learner,
        is_absent=learner.state == words.ABSENT,
        absent_because=(
          learner.lost_because if learner.state == words.ABSENT else ''
        ),
        restarts=learner.restarts,
        steps=learner.total_steps,
        processed_tokens=learner.processed_tokens,
        useful_tokens=useful_tokens(status, learner.learner),
        merged_tokens=learner.merged_tokens,
        tokens_per_second=learner.rates.median,
        loss=learner.loss,
        participation=learner.participation,
        participation_since_return=(
          learner.participation_since_return if learner.restarts else None
        ),
        rounds_merged=learner.rounds_merged,
        staleness_mean=learner.staleness_mean,
        weight_share=status.weight_share(learner.learner),
        refusals=dict(sorted(learner.refusals.items())),
        bytes_up=learner.bytes_up,
        bytes_down=learner.bytes_down,
        traffic=dict(learner.traffic),
      )
      for learner in status.learners.values()
    ),
    facts=facts,
  )


def _jsonable(value: Any) -> Any:
  if isinstance(value, dict):
    return {str(key): _jsonable(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_jsonable(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
