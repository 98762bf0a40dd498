"""What a syncer's tape tells: who was merged, refused, forgotten."""

import collections
from typing import TypeVar

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg

Kind = TypeVar('Kind')
Tape = list[tuple[ev.Event, tuple[fx.Effect, ...]]]


class Accounts:
  """Questions to the tape of a syncer."""

  tape: Tape

  def effects(self, kind: type[Kind]) -> list[Kind]:
    """The syncer's effects of one kind, in order."""
    return [
      effect
      for _, effects in self.tape
      for effect in effects
      if isinstance(effect, kind)
    ]

  def refusals(self, reason: msg.Reason | None = None) -> list[msg.Refusal]:
    """The refusals, all or those for one reason."""
    return [
      effect.message
      for effect in self.effects(fx.Send)
      if isinstance(effect.message, msg.Refusal)
      and reason in (None, effect.message.reason)
    ]

  def participation(self, m: int, before: int | None = None) -> float:
    """The share of the rounds (before this one) in which m was merged."""
    merges = [
      merge
      for merge in self.effects(fx.Merge)
      if before is None or merge.round < before
    ]
    taken = [
      merge
      for merge in merges
      if m in {share.learner for share in merge.shares}
    ]
    return len(taken) / len(merges)

  def merges_of(self, round_: int) -> list[fx.Merge]:
    """The merges of one round; there may be one at most."""
    return [merge for merge in self.effects(fx.Merge) if merge.round == round_]

  def merged_tokens(self) -> collections.Counter[tuple[int, int]]:
    """Tokens merged, by learner and fragment.

    Asserts on the way that every payload that was accepted is merged once or
    discarded once, and that no round is merged twice.
    """
    kept: dict[tuple[int, int], int] = {}
    merged = collections.Counter()
    merging: dict[int, dict[tuple[int, int], int]] = {}
    rounds = set()

    def count(round_: int) -> None:
      assert round_ not in rounds
      rounds.add(round_)
      merged.update(merging.pop(round_))

    for event, effects in self.tape:
      match event:
        case ev.MergeDone(round=round_):
          count(round_)
        case ev.Restarted(merged=durable):
          for round_ in durable:
            # The tape may tell of its end as well.
            if round_ in merging:
              count(round_)
          merging.clear()
          kept.clear()
      for effect in effects:
        match effect:
          case fx.Accept(learner=learner, round=round_):
            assert isinstance(event, ev.MessageArrived)
            assert isinstance(event.message, msg.Contribution)
            assert (learner, round_) not in kept
            kept[learner, round_] = event.message.tokens
          case fx.Discard(learner=learner, round=round_):
            del kept[learner, round_]
          case fx.Merge(round=round_, fragment=fragment, shares=shares):
            assert round_ not in merging
            merging[round_] = {
              (share.learner, fragment): kept.pop((share.learner, round_))
              for share in shares
            }
    assert not kept
    assert not merging
    return merged

  def when(self, kind: type) -> float:
    """The time of the first message of this kind to all learners."""
    return next(
      event.now
      for event, effects in self.tape
      for effect in effects
      if isinstance(effect, fx.Broadcast) and isinstance(effect.message, kind)
    )
