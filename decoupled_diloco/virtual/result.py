"""What a run on a virtual clock came to."""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from decoupled_diloco.observe import status
from decoupled_diloco.observe.goodput import account
from decoupled_diloco.observe.tape_lines import (
  END,
  Step,
  TapeHeader,
  group_bytes,
)
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol.messages import Contribution
from decoupled_diloco.protocol.syncer_state import SyncerOptions


class Point(NamedTuple):
  """The global model at one time of a run.

  Attributes:
    seconds: virtual time.
    merged_tokens: tokens merged by then, each fragment counting 1/P.
    rounds: rounds merged by then.
    loss: what the setup's `evaluate` gives.
  """

  seconds: float
  merged_tokens: float
  rounds: int
  loss: float


@dataclasses.dataclass(frozen=True)
class Result:
  """A finished run.

  Attributes:
    points: the loss of the global model over the run.
    params: the global parameters at the end.
    reason: why the run ended.
    seconds: virtual time at its end.
    rounds: merged rounds, those of the drain included.
    processed_tokens: tokens that learners have trained on in whole scans.
    merged_tokens: tokens that the global model got.
    goodput: useful tokens / capacity, as `observe.goodput` defines it; None if
      there are no heartbeats to tell the learners' rates.
    participation: by learner, the share of the rounds merged since it first
      joined with it in; None if it never joined.
    staleness: of merged contributions: versions between base and merge -> how
      many.
    bytes_up, bytes_down: payload bytes by learner, as the syncer counts them.
    overlap_steps: inner steps between a hand-over and the adoption of what it
      was merged into, mean over all; None if there was none.
    training_losses: by learner, the mean loss of every scan, in order.
    header, steps: the tape of the syncer; see `tape`.
  """

  points: tuple[Point, ...]
  params: Any
  reason: str
  seconds: float
  rounds: int
  processed_tokens: int
  merged_tokens: float
  goodput: float | None
  participation: Mapping[int, float | None]
  staleness: Mapping[int, int]
  bytes_up: Mapping[int, int]
  bytes_down: Mapping[int, int]
  overlap_steps: float | None
  training_losses: tuple[tuple[float, ...], ...]
  header: TapeHeader | None = None
  steps: Sequence[Step] = ()

  @property
  def loss(self) -> float:
    """The loss at the end; nan if none was measured."""
    return self.points[-1].loss if self.points else math.nan

  @property
  def yield_(self) -> float | None:
    """Merged tokens / processed tokens; None if none was processed."""
    if not self.processed_tokens:
      return None
    return self.merged_tokens / self.processed_tokens

  @property
  def mean_staleness(self) -> float | None:
    """Mean over the merged contributions; None if there is none."""
    count = sum(self.staleness.values())
    if not count:
      return None
    return sum(age * many for age, many in self.staleness.items()) / count

  def tape(self) -> bytes:
    """The syncer's events and effects as JSON lines, like a real run's tape."""
    if self.header is None:
      return b''
    groups = (group_bytes(event, effects) for event, effects in self.steps)
    return b''.join([self.header.to_json().encode() + END, *groups])

  def write_tape(self, path: str | pathlib.Path) -> None:
    """Writes the tape to a file, for whatever reads tapes."""
    pathlib.Path(path).write_bytes(self.tape())


class Books:
  """Follows a syncer's events and keeps what a `Result` needs.

  Args:
    options: of the syncer.
    fragment_sizes: elements of every fragment.
    value_bytes: bytes of every fragment when it is sent as a value.
  """

  def __init__(
    self,
    options: SyncerOptions,
    fragment_sizes: Sequence[int],
    value_bytes: Sequence[int],
  ):
    facts = {'fragment_value_bytes': list(value_bytes)}
    self.header = TapeHeader.of('syncer', options, fragment_sizes, facts)
    self.steps: list[Step] = []
    self.status = status.init(self.header)
    self.staleness: collections.Counter[int] = collections.Counter()
    self._base_versions: dict[tuple[int, int], int] = {}

  def record(self, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
    """Takes in one event with its effects."""
    self.steps.append((event, tuple(effects)))
    status.update(self.status, event, effects)
    for effect in effects:
      match effect:
        case fx.Accept():
          assert isinstance(event, ev.MessageArrived)
          assert isinstance(event.message, Contribution)
          key = effect.learner, effect.round
          self._base_versions[key] = event.message.base_version
        case fx.Discard():
          del self._base_versions[effect.learner, effect.round]
        case fx.Merge():
          for share in effect.shares:
            base = self._base_versions.pop((share.learner, effect.round))
            self.staleness[effect.version - 1 - base] += 1

  def figures(self) -> dict[str, Any]:
    """The fields of a `Result` that follow from the tape."""
    learners = self.status.learners
    ended_at = self.status.ended_at
    return {
      'reason': self.status.end_reason,
      'seconds': self.status.now if ended_at is None else ended_at,
      'rounds': self.status.rounds_merged,
      'merged_tokens': self.status.merged_tokens,
      'goodput': account(self.status).goodput,
      'participation': {m: each.participation for m, each in learners.items()},
      'staleness': dict(sorted(self.staleness.items())),
      'bytes_up': {m: each.bytes_up for m, each in learners.items()},
      'bytes_down': {m: each.bytes_down for m, each in learners.items()},
      'header': self.header,
      'steps': self.steps,
    }
