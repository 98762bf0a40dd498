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

  def merged_entries(self) -> list[msg.Contribution]:
    """The contributions that were merged, in order.

    Asserts on the way that every payload that was accepted is merged once or
    discarded once, and that no round is merged twice.
    """
    kept: dict[tuple[int, int], msg.Contribution] = {}
    merging: dict[int, list[msg.Contribution]] = {}
    merged: dict[int, list[msg.Contribution]] = {}
    for event, effects in self.tape:
      match event:
        case ev.MergeDone(round=round_):
          assert round_ not in merged
          merged[round_] = merging.pop(round_)
        case ev.Restarted(merged=durable):
          for round_ in durable:
            # The tape may tell of its end as well.
            if round_ in merging:
              assert round_ not in merged
              merged[round_] = merging.pop(round_)
          merging.clear()
          kept.clear()
      for effect in effects:
        match effect:
          case fx.Accept(learner=learner, round=round_):
            assert isinstance(event, ev.MessageArrived)
            assert isinstance(event.message, msg.Contribution)
            assert (learner, round_) not in kept
            kept[learner, round_] = event.message
          case fx.Discard(learner=learner, round=round_):
            del kept[learner, round_]
          case fx.Merge(round=round_, shares=shares):
            assert round_ not in merging
            merging[round_] = [
              kept.pop((share.learner, round_)) for share in shares
            ]
    assert not kept
    assert not merging
    return [entry for entries in merged.values() for entry in entries]

  def merged_tokens(self) -> collections.Counter[tuple[int, int]]:
    """Tokens merged, by learner and fragment."""
    merged = collections.Counter()
    for entry in self.merged_entries():
      merged[entry.learner, entry.fragment] += entry.tokens
    return merged

  def assert_no_token_is_merged_twice(self) -> None:
    """Of each learner and fragment, the ranges of data do not overlap."""
    ends: dict[tuple[int, int], int] = {}
    for entry in self.merged_entries():
      key = entry.learner, entry.fragment
      assert entry.total_tokens - entry.tokens >= ends.get(key, 0), entry
      ends[key] = entry.total_tokens

  def when(self, kind: type) -> float:
    """The time of the first message of this kind to all learners."""
    return next(
      event.now
      for event, effects in self.tape
      for effect in effects
      if isinstance(effect, fx.Broadcast) and isinstance(effect.message, kind)
    )
