"""What a simulated cluster works on: with arrays or without.

The engine carries out when things happen; a `Work` carries out what happens to
arrays. Each of its calls is that of a real learner's or syncer's shell at the
same point.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from decoupled_diloco.protocol.effects import Adopt, Merge
from decoupled_diloco.protocol.messages import Contribution, Publication


class Payload(NamedTuple):
  """What travels with a contribution or a publication.

  Attributes:
    num_bytes: its size on the wire.
    norm: Euclidean norm of the delta in it; None if that is not finite.
    content: anything; the engine carries it to whoever receives the message.
  """

  num_bytes: int
  norm: float | None = 0.0
  content: Any = None


class Work(Protocol):
  """What learners and the syncer do with arrays."""

  def tokens_per_scan(self, learner: int) -> int:
    """How many tokens one scan of this learner trains on."""
    ...

  # A learner's part.

  def stop(self, learner: int) -> None:
    """Its process has ended: what it held is gone, a begun scan with it."""
    ...

  def stage(self, learner: int, publication: Publication, content: Any) -> None:
    """A version has come in; `adopt`, `begin` or a newer one follows."""
    ...

  def begin(
    self, learner: int, versions: tuple[int, ...], rejoin_step: int | None
  ) -> None:
    """Sets out from these staged versions.

    Args:
      learner: who.
      versions: per fragment.
      rejoin_step: the run's global step, if it has begun without this learner.
    """
    ...

  def adopt(self, learner: int, adopt: Adopt) -> None:
    """Adopts a staged version."""
    ...

  def snapshot(self, learner: int) -> None:
    """Keeps what the learner holds, for `resume`."""
    ...

  def resume(self, learner: int) -> None:
    """Its new process holds what the last snapshot has kept."""
    ...

  def start_scan(self, learner: int, global_step: int, first_step: int) -> None:
    """A scan begins; its result is not needed before `end_scan`.

    Args:
      learner: who.
      global_step: the run's step at which it begins.
      first_step: the learner's own: its position in the data, in batches.
    """
    ...

  def end_scan(self, learner: int) -> float | None:
    """The scan has ended; returns its mean loss, if there is one."""
    ...

  def hand_over(self, learner: int, contribution: Contribution) -> Payload:
    """The fragment's delta as it is now."""
    ...

  def forget(self, learner: int, fragment: int, round_: int) -> None:
    """A hand-over will not be merged."""
    ...

  # The syncer's part.

  def merge(self, merge: Merge, contents: Mapping[int, Any]) -> Payload:
    """Merges a round.

    Args:
      merge: which, and with which weights.
      contents: of the contributions, by learner.

    Returns:
      The payload of the publication, with the norm of the merged delta.
    """
    ...

  def value(self, fragment: int, version: int) -> Payload:
    """The newest version of a fragment itself, for a learner that lacks it."""
    ...

  @property
  def form(self) -> str:
    """The form of publications: 'update' or 'value'."""
    ...


class NoWork:
  """No arrays: sizes only.

  Args:
    tokens_per_scan: of every learner.
    up_bytes, down_bytes, value_bytes: per fragment, of a contribution, of a
      publication, and of a fragment sent as a value.
  """

  form = 'update'

  def __init__(
    self,
    tokens_per_scan: tuple[int, ...],
    up_bytes: tuple[int, ...],
    down_bytes: tuple[int, ...],
    value_bytes: tuple[int, ...],
  ):
    self._tokens_per_scan = tokens_per_scan
    self._up = [Payload(num_bytes, 1.0) for num_bytes in up_bytes]
    self._down = [Payload(num_bytes, 1.0) for num_bytes in down_bytes]
    self._values = [Payload(num_bytes) for num_bytes in value_bytes]

  def tokens_per_scan(self, learner: int) -> int:
    """See `Work`."""
    return self._tokens_per_scan[learner]

  def stop(self, learner: int) -> None:
    """Nothing to do."""

  def stage(self, learner: int, publication: Publication, content: Any) -> None:
    """Nothing to do."""

  def begin(
    self, learner: int, versions: tuple[int, ...], rejoin_step: int | None
  ) -> None:
    """Nothing to do."""

  def adopt(self, learner: int, adopt: Adopt) -> None:
    """Nothing to do."""

  def snapshot(self, learner: int) -> None:
    """Nothing to do."""

  def resume(self, learner: int) -> None:
    """Nothing to do."""

  def start_scan(self, learner: int, global_step: int, first_step: int) -> None:
    """Nothing to do."""

  def end_scan(self, learner: int) -> None:
    """Nothing to do."""

  def hand_over(self, learner: int, contribution: Contribution) -> Payload:
    """A payload of the right size."""
    return self._up[contribution.fragment]

  def forget(self, learner: int, fragment: int, round_: int) -> None:
    """Nothing to do."""

  def merge(self, merge: Merge, contents: Mapping[int, Any]) -> Payload:
    """A payload of the right size."""
    return self._down[merge.fragment]

  def value(self, fragment: int, version: int) -> Payload:
    """A payload of the right size."""
    return self._values[fragment]
