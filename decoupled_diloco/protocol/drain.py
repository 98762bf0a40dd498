"""The end of a run: every fragment is merged once more, from whoever is there.

When the budget is met, rounds that have a quorum are closed at once and those
that have none are cancelled: the work in their contributions is handed over
again. Then P rounds follow in which every learner hands over every fragment it
has trained since it last adopted it; after that it trains no further. A round
of the drain ends when everybody who is connected is in or has said farewell,
or when the time is up, so that a learner that finished early, hangs or died
holds nobody up.

When the last round is merged, what is final is saved. Only then are learners
told that the run has ended: whoever hears it may rely on the checkpoint.
"""

from decoupled_diloco.protocol import pace
from decoupled_diloco.protocol.effects import (
  Broadcast,
  Discard,
  Effect,
  Finish,
  Notice,
  Save,
)
from decoupled_diloco.protocol.events import Saved
from decoupled_diloco.protocol.messages import DrainStarted, Reason, RunEnded
from decoupled_diloco.protocol.rounds import Stage
from decoupled_diloco.protocol.syncer_state import (
  Phase,
  SyncerOptions,
  SyncerState,
)


def met_budget(options: SyncerOptions, state: SyncerState) -> str | None:
  """Which budget is met, in words; None if none is."""
  budget = options.budget
  if budget.rounds and state.current >= budget.rounds:
    return f'{budget.rounds} rounds'
  if budget.merged_tokens and state.merged_tokens >= budget.merged_tokens:
    return f'{budget.merged_tokens:,} merged tokens'
  return None


def begin(
  options: SyncerOptions,
  state: SyncerState,
  now: float,
  reason: str,
  effects: list[Effect],
  *,
  has_met_budget: bool,
) -> SyncerState:
  """Ends the ordinary rounds and asks every learner for what it has.

  A run that is stopped before its budget is met drains in a hurry.
  """
  if state.phase not in (Phase.GATHERING, Phase.RUNNING):
    return state
  # The drain's rounds come after any that may still be on its way, so that none
  # of those is taken for a learner's last word.
  newest = max([-1, *state.rounds])
  if state.phase is Phase.RUNNING:
    newest = max(newest, options.newest_proposal(state.current))
  for number in sorted(state.rounds):
    round_ = state.rounds[number]
    if round_.stage is Stage.GRACE or (
      round_.stage is Stage.OPEN
      and len(round_.contributors) >= options.quorum.min_learners
    ):
      state = state.with_round(
        round_._replace(stage=Stage.CLOSED, closed_at=now)
      )
    elif round_.stage is Stage.OPEN:
      for entry in round_.entries:
        pace.refuse(
          entry,
          Reason.DRAINING,
          f'the run drains and round {number} has no quorum; hand over again',
          effects,
        )
        effects.append(Discard(entry.learner, number))
      state = state.without_round(number)
  effects.append(Notice(f'Draining: {reason}.'))
  budget = options.budget
  drain_seconds = (
    budget.drain_seconds if has_met_budget else budget.stop_seconds
  )
  effects.append(Broadcast(DrainStarted(newest + 1, drain_seconds)))
  first = newest + 1
  return state._replace(
    phase=Phase.DRAINING,
    current=first,
    drain_open=frozenset(range(first, first + options.schedule.num_fragments)),
    drain_seconds=drain_seconds,
    drain_until=now + drain_seconds,
    end_reason=reason,
    has_met_budget=has_met_budget,
  )


def close(state: SyncerState, now: float) -> SyncerState:
  """Closes the drain's rounds that nobody can or may join any more."""
  if state.phase is not Phase.DRAINING:
    return state
  is_over = now >= state.drain_until
  if not is_over and state.awaits_return(now):
    return state
  for number in sorted(state.drain_open):
    round_ = state.rounds.get(number)
    contributors = round_.contributors if round_ else frozenset()
    if not is_over and not state.expected_in(number) <= contributors:
      continue
    state = state._replace(drain_open=state.drain_open - {number})
    if round_:
      state = state.with_round(
        round_._replace(stage=Stage.CLOSED, closed_at=now)
      )
  return state


def save(state: SyncerState, effects: list[Effect]) -> SyncerState:
  """Saves when nothing is being merged and nobody can add anything."""
  if state.phase is not Phase.DRAINING or state.rounds or state.drain_open:
    return state
  effects.append(Save(state.end_reason))
  return state._replace(phase=Phase.SAVING)


def reassure(
  state: SyncerState, now: float, effects: list[Effect]
) -> SyncerState:
  """Tells learners that the syncer is there while it merges and saves.

  They give it up when it is silent for twice the time of the drain, and the
  last merges and the final checkpoint may take longer.
  """
  is_ending = state.phase in (Phase.DRAINING, Phase.SAVING)
  if not is_ending or now < state.drain_until:
    return state
  effects.append(Broadcast(DrainStarted(state.current, state.drain_seconds)))
  return state._replace(drain_until=now + state.drain_seconds)


def finish(
  state: SyncerState, event: Saved, effects: list[Effect]
) -> SyncerState:
  """Ends the run; as a failure if what is final could not be saved."""
  if state.phase is not Phase.SAVING:
    raise ValueError(f'{event} comes without a `Save`.')
  reason = state.end_reason
  if event.error:
    reason = f'{reason}, but the final checkpoint is lost: {event.error}'
  is_early = not state.has_met_budget
  effects.append(Broadcast(RunEnded(reason, is_early)))
  effects.append(Finish(reason, is_failure=bool(event.error)))
  return state._replace(phase=Phase.FINISHED, end_reason=reason)
