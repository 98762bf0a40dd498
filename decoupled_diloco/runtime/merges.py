"""The payloads of a syncer's rounds, from a contribution to its publication."""

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.syncer_state import SyncerState
from decoupled_diloco.training.global_model import GlobalModel, Merged
from decoupled_diloco.transport.base import Parcel, Payload

KeepMerge: TypeAlias = Callable[[SyncerState, fx.Merge, Merged], None]


class Merges:
  """Keeps payloads until they are merged, and merges them.

  Args:
    model: the global parameters.
    clock: seconds from any start.
    keep_merge: makes a merge durable; is called after the model has made it,
      with what the machine remembered when it began.
  """

  def __init__(
    self,
    model: GlobalModel,
    clock: Callable[[], float],
    keep_merge: KeepMerge,
  ):
    self._model = model
    self._clock = clock
    self._keep_merge = keep_merge
    self._contributions: dict[tuple[int, int], Payload] = {}
    self._publications: dict[int, bytes] = {}  # By round, until published.

  def inspect(self, parcel: Parcel) -> ev.PayloadFacts | None:
    """Looks at a contribution before anything is decided about it.

    May be called by several threads at once; None if it is no contribution.
    """
    contribution, num_bytes = parcel.message, parcel.wire_bytes
    if not isinstance(contribution, msg.Contribution):
      return None
    if not parcel.is_intact or not (
      0 <= contribution.fragment < self._model.plan.num_fragments
    ):
      return ev.PayloadFacts(num_bytes, is_intact=False, norm=None)
    try:
      norm = self._model.norm_of(contribution.fragment, parcel.payload)
    except ValueError:
      return ev.PayloadFacts(num_bytes, norm=None, fits_layout=False)
    return ev.PayloadFacts(num_bytes, norm=norm)

  def keep(self, learner: int, round_: int, payload: Payload) -> None:
    """Keeps an accepted payload."""
    self._contributions[learner, round_] = payload

  def discard(self, learner: int, round_: int) -> None:
    """Forgets a payload that will not be merged."""
    del self._contributions[learner, round_]

  def prepare(
    self, merge: fx.Merge, state: SyncerState, pending: Future[Any] | None
  ) -> Callable[[], ev.MergeDone]:
    """Takes the payloads of a merge; returns the work, for an executor.

    Args:
      merge: what to merge.
      state: what the machine remembers.
      pending: something that needs the fragment as it is before that.
    """
    contributions = {
      share.learner: self._contributions.pop((share.learner, merge.round))
      for share in merge.shares
    }
    weights = {share.learner: share.weight for share in merge.shares}

    def work() -> ev.MergeDone:
      if pending is not None:
        concurrent.futures.wait([pending])
      merged = self._model.merge(merge.fragment, weights, contributions)
      self._keep_merge(state, merge, merged)
      self._publications[merge.round] = merged.payload
      return ev.MergeDone(
        self._clock(), merge.round, len(merged.payload), merged.norm
      )

    return work

  def publication(self, publish: fx.Publish) -> tuple[msg.Publication, bytes]:
    """The message of a merged round, with its payload, which is then let go."""
    publication = msg.Publication(
      publish.round,
      publish.fragment,
      publish.version,
      publish.contributors,
      self._model.form,
      merged_tokens=publish.merged_tokens,
    )
    return publication, self._publications.pop(publish.round)
