"""What a machine asks its shell to do, in this order and nothing else."""

import dataclasses
from typing import TypeAlias

from decoupled_diloco.protocol.messages import Contribution, Message


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
  """Send a message to one learner (from a learner: to the syncer)."""

  learner: int
  message: Message


@dataclasses.dataclass(frozen=True, slots=True)
class Broadcast:
  """Send a message without payload to every connected learner.

  Attributes:
    knowing: but not to these, who need not be told.
  """

  message: Message
  knowing: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SendFragments:
  """Send these fragments, each as a publication of its current value."""

  learner: int
  fragments: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GraceBegan:
  """For those who watch: a round has its quorum, and this much grace.

  Attributes:
    quorum_seconds: from the first contribution to the quorum.
    grace_seconds: how long more contributions are admitted, at most.
    reason: where that figure comes from.
  """

  round: int
  fragment: int
  quorum_seconds: float
  grace_seconds: float
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
  """One contribution's part in a merge."""

  learner: int
  weight: float


@dataclasses.dataclass(frozen=True, slots=True)
class Merge:
  """Merge a round, apply the outer update, make it durable; then `MergeDone`.

  Attributes:
    version: the version that this makes.
    shares: who is merged, with which weight.
  """

  round: int
  fragment: int
  version: int
  shares: tuple[Share, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
  """Send a merged round with its payload to these learners.

  Attributes:
    merged_tokens: as in `Publication`.
  """

  round: int
  fragment: int
  version: int
  contributors: tuple[int, ...]
  learners: tuple[int, ...]
  merged_tokens: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Accept:
  """Keep the payload that came with this event until a merge or `Discard`."""

  learner: int
  round: int


@dataclasses.dataclass(frozen=True, slots=True)
class Discard:
  """Forget the payload of a contribution that will not be merged."""

  learner: int
  round: int


@dataclasses.dataclass(frozen=True, slots=True)
class Disconnect:
  """Close a learner's connection.

  Attributes:
    is_final: it is superseded or quarantined: tell it, with a `Rejection`, not
      to come back.
  """

  learner: int
  incarnation: int
  reason: str
  is_final: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class WakeAt:
  """Give a `TimePassed` event then, unless a later `WakeAt` replaces it."""

  at: float


@dataclasses.dataclass(frozen=True, slots=True)
class Notice:
  """Tell the people who watch; given once, when it changes."""

  text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
  """Save what is final, beside the machine's thread; then `Saved`.

  Nothing changes the global parameters any more.

  Attributes:
    reason: why the run ended.
  """

  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
  """Stop; nothing follows.

  Attributes:
    reason: a sentence for people.
    is_failure: it ends because it may not take part, or because what is final
      could not be saved.
    is_early: of a learner: the run may be continued.
  """

  reason: str
  is_failure: bool = False
  is_early: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class HandOver:
  """Encode the fragment's delta as it is at this boundary, and send it."""

  contribution: Contribution


@dataclasses.dataclass(frozen=True, slots=True)
class Resend:
  """Send the payload of a hand-over again, as it was."""

  contribution: Contribution


@dataclasses.dataclass(frozen=True, slots=True)
class Adopt:
  """Replace the learner's copy of a fragment by the staged newer version.

  Attributes:
    round: the round that made this version.
    merged_round: the learner's own hand-over of this fragment that was merged
      since it last adopted it; -1 if none was.
    is_anew: nothing may stay of the local copy's progress, which `rebase` would
      keep: a former process of the learner has handed it over.
  """

  round: int
  fragment: int
  version: int
  merged_round: int
  is_anew: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Forget:
  """A hand-over will not be merged: let go of what was kept for it."""

  round: int
  fragment: int


@dataclasses.dataclass(frozen=True, slots=True)
class StartScan:
  """Train one scan; its first inner step is this step of the run."""

  global_step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
  """Start no scan before an event says so."""

  reason: str


Effect: TypeAlias = (
  Accept
  | Send
  | Broadcast
  | SendFragments
  | GraceBegan
  | Merge
  | Publish
  | Discard
  | Disconnect
  | WakeAt
  | Notice
  | Save
  | Finish
  | HandOver
  | Resend
  | Adopt
  | Forget
  | StartScan
  | Wait
)
