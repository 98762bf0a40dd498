"""What follows from a merge that is durable."""

from decoupled_diloco.protocol.effects import Effect, Publish
from decoupled_diloco.protocol.rounds import Stage
from decoupled_diloco.protocol.syncer_state import SyncerOptions, SyncerState


def publish(
  options: SyncerOptions,
  state: SyncerState,
  number: int,
  effects: list[Effect],
) -> SyncerState:
  """Makes the version that a merged round has brought the fragment's newest."""
  round_ = state.rounds[number]
  assert round_.stage is Stage.MERGING
  p = round_.fragment
  version = state.versions[p] + 1
  contributors = tuple(sorted(round_.contributors))
  for entry in round_.entries:
    member = state.members[entry.learner]
    merged = list(member.merged_rounds)
    merged[p] = round_.number
    member = member._replace(
      merged_rounds=tuple(merged),
      merged_steps=max(member.merged_steps, entry.total_steps),
      merged_tokens=max(member.merged_tokens, entry.total_tokens),
    )
    state = state.with_member(entry.learner, member)
  # The version is bumped before it is published, so that a learner that joins
  # now is told of the same parameters that the others are being sent.
  versions = (*state.versions[:p], version, *state.versions[p + 1 :])
  version_rounds = (
    *state.version_rounds[:p],
    round_.number,
    *state.version_rounds[p + 1 :],
  )
  tokens = sum(entry.tokens for entry in round_.entries)
  merged_tokens = state.merged_tokens + tokens / options.schedule.num_fragments
  oldest = round_.number - options.rounds_remembered
  closed_at = {
    number: at for number, at in state.closed_at.items() if number >= oldest
  }
  effects.append(
    Publish(
      round_.number, p, version, contributors, state.connected, merged_tokens
    )
  )
  return state.without_round(round_.number)._replace(
    versions=versions,
    version_rounds=version_rounds,
    closed_at={**closed_at, round_.number: round_.closed_at},
    rounds_merged=state.rounds_merged + 1,
    merged_tokens=merged_tokens,
  )
