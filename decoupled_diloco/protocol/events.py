"""What a machine is told.

Each machine of this protocol is `step(state, event) -> (state, effects)`. Time
enters it only as `event.now`, in seconds of whatever clock its shell keeps: a
real one, a virtual one, or a script.
"""

import dataclasses
from typing import TypeAlias

from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.messages import Message
from decoupled_diloco.protocol.syncer_state import SyncerState


@dataclasses.dataclass(frozen=True, slots=True)
class PayloadFacts:
  """What the shell found out about a payload, without which nothing decides.

  Attributes:
    num_bytes: its size on the wire, framing included.
    is_intact: it is, byte for byte, what was sent.
    norm: Euclidean norm of the decoded delta; None if it is not finite, or if
      the payload could not be decoded.
    fits_layout: it has the length that its fragment takes in the codec.
  """

  num_bytes: int
  is_intact: bool = True
  norm: float | None = 0.0
  fits_layout: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class MessageArrived:
  """A message came in whole; `payload` is None for one that carries none."""

  now: float
  message: Message
  payload: PayloadFacts | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLost:
  """A connection broke; at the syncer, that of this learner's incarnation."""

  now: float
  learner: int
  incarnation: int
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class TimePassed:
  """It is now at least the time that the last `WakeAt` asked for."""

  now: float


@dataclasses.dataclass(frozen=True, slots=True)
class MergeDone:
  """The syncer's shell has merged a round and made it durable.

  Attributes:
    num_bytes: size of the publication's payload.
    norm: Euclidean norm of the merged delta.
  """

  now: float
  round: int
  num_bytes: int
  norm: float


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
  """The syncer's shell has saved what is final, or cannot.

  Attributes:
    error: why it could not be saved, in words; '' if it was.
  """

  now: float
  error: str = ''


@dataclasses.dataclass(frozen=True, slots=True)
class Restarted:
  """The syncer's shell has restored the run from what was durable.

  Attributes:
    life: how often the syncer of this run was started, this time included.
    state: what the machine remembered when the last merge that is durable
      began; None if none is.
    merged: rounds that were still being merged then, but whose merges are
      durable as well; in their order.
  """

  now: float
  life: int
  state: SyncerState | None
  merged: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StopRequested:
  """Somebody wants the run to drain and end now."""

  now: float
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
  """The learner has compiled its scan; it can adopt and train."""

  now: float


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
  """The learner's shell has restored a snapshot of a former process.

  Attributes:
    state: what the machine remembered when the snapshot was taken, which was
      before a scan.
  """

  now: float
  state: LearnerState


@dataclasses.dataclass(frozen=True, slots=True)
class ScanEnded:
  """The learner has finished a scan.

  Attributes:
    steps, tokens: inner steps and tokens of this scan.
    seconds: how long it took.
  """

  now: float
  steps: int
  tokens: int
  seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class HandOverDropped:
  """The learner's shell could not send a hand-over and let it go."""

  now: float
  round: int


Event: TypeAlias = (
  MessageArrived
  | ConnectionLost
  | TimePassed
  | MergeDone
  | Saved
  | Restarted
  | StopRequested
  | Compiled
  | Resumed
  | ScanEnded
  | HandOverDropped
)
