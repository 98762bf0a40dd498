"""A syncer that goes on with a run after it was stopped or killed.

What lives on is what was durable: the merges, and what the machine remembered
when the last of them began. Contributions that were accepted and not merged are
gone; learners still have that work, and hand it over again.
"""

from decoupled_diloco.protocol import drain, publishing
from decoupled_diloco.protocol.effects import Effect, Notice
from decoupled_diloco.protocol.events import Restarted
from decoupled_diloco.protocol.membership import Member
from decoupled_diloco.protocol.syncer_state import (
  Phase,
  SyncerOptions,
  SyncerState,
)

# Between the first incarnations of two lives of the syncer, so that none that
# the last life gave, unknown to this one, is given again.
_INCARNATIONS_PER_LIFE = 1_000_000


def restore(
  options: SyncerOptions,
  state: SyncerState,
  event: Restarted,
  effects: list[Effect],
) -> SyncerState:
  """Goes on where the last durable merge has left the run."""
  if event.state is not None:
    state = event.state
  P = options.schedule.num_fragments
  if len(state.versions) != P:
    raise ValueError(
      f'the run has {len(state.versions)} fragments, and num_fragments={P}; '
      'go on with the config that it was begun with.'
    )
  for number in event.merged:
    # Nobody is connected, so what would be published need not be.
    state = publishing.publish(options, state, number, [])
  state = state._replace(
    paced_at=event.now,
    rounds={},
    members={
      learner: _absent(member, event.now)
      for learner, member in state.members.items()
      if learner < options.membership.num_learners
    },
    closed_at={},
    next_incarnation=max(
      state.next_incarnation, (event.life - 1) * _INCARNATIONS_PER_LIFE + 1
    ),
    began_at=event.now,
    absent=None,
    wake_at=None,
    returning_until=event.now + options.membership.liveness_timeout_seconds,
  )
  if state.phase in (Phase.DRAINING, Phase.SAVING, Phase.FINISHED):
    state = _resume_end(options, state, event.now)
  effects.append(
    Notice(
      f'The syncer goes on with run {options.run_id}: '
      f'{state.rounds_merged:,} rounds are merged.'
    )
  )
  return state


def _absent(member: Member, now: float) -> Member:
  """A learner that may come back, and of which nothing is held."""
  return member._replace(
    is_connected=False,
    is_ready=False,
    admitted_at=now,
    last_seen=min(member.last_seen, now),
    last_round=max(member.merged_rounds),
  )


def _resume_end(
  options: SyncerOptions, state: SyncerState, now: float
) -> SyncerState:
  """Drains again; or trains on, if the run has a budget (again)."""
  if drain.met_budget(options, state) is None:
    newest = max(state.current - 1, *state.version_rounds)
    return state._replace(
      phase=Phase.RUNNING,
      current=newest + 1,
      drain_open=frozenset(),
      end_reason='',
      has_met_budget=False,
    )
  first = state.current
  last_rounds = range(first, first + options.schedule.num_fragments)
  return state._replace(
    phase=Phase.DRAINING,
    drain_open=frozenset(
      number
      for number in last_rounds
      if state.version_rounds[options.schedule.fragment_of(number)] < number
    ),
    drain_until=now + state.drain_seconds,
  )
