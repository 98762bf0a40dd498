"""How a learner enters a run: anew, after a broken link, or from a snapshot."""

from decoupled_diloco.protocol.effects import Effect, Forget, Send
from decoupled_diloco.protocol.learner_state import (
  LearnerOptions,
  LearnerState,
  Ledger,
  Phase,
  initial_state,
)
from decoupled_diloco.protocol.messages import Ready, Welcome


def enter(
  options: LearnerOptions,
  state: LearnerState,
  welcome: Welcome,
  effects: list[Effect],
) -> LearnerState:
  """Takes part from here on; settles what was in flight when the link broke."""
  ledgers = []
  for fragment, ledger in enumerate(state.ledgers):
    flight = ledger.flight
    if flight and not _has_arrived(flight.round, fragment, welcome):
      effects.append(Forget(flight.round, fragment))
      ledger = ledger._replace(flight=None)
    if state.incarnation == 0:
      ledger = _with_former_lives(options, fragment, ledger, welcome)
    ledgers.append(ledger)
  is_draining = welcome.drain_first >= 0
  if not is_draining and state.drain_first is not None:
    # The drain began in a life of the syncer that has left no trace of it.
    state = state._replace(phase=Phase.WAITING, leave_at=None)
  state = state._replace(
    is_connected=True,
    is_announced=False,
    has_said_farewell=False,
    incarnation=welcome.incarnation,
    run_id=welcome.run_id,
    # Not the newest one that it has heard of: a syncer that was killed goes on
    # with the rounds that were merged.
    newest_round=welcome.round,
    last_round=welcome.last_round,
    total_steps=max(state.total_steps, welcome.total_steps),
    total_tokens=max(state.total_tokens, welcome.total_tokens),
    ledgers=tuple(ledgers),
    drain_first=welcome.drain_first if is_draining else None,
    awaited=welcome.versions if state.incarnation == 0 else state.awaited,
    drained=frozenset(
      round_
      for round_ in state.drained
      if _has_arrived(round_, options.schedule.fragment_of(round_), welcome)
    ),
  )
  return announce(options, state, effects)


def _with_former_lives(
  options: LearnerOptions, fragment: int, ledger: Ledger, welcome: Welcome
) -> Ledger:
  """A new process's books, now that it hears what became of its forerunners.

  If more was handed over since its snapshot, the work in the local copy is
  merged already, or will be; a newer version is then on its way.
  """
  merged_round = welcome.merged_rounds[fragment]
  is_held = any(
    options.schedule.fragment_of(number) == fragment
    for number in welcome.held_rounds
  )
  is_known = ledger.merged_round == merged_round and not is_held
  if ledger.base_version < 0 or is_known:
    return ledger._replace(merged_round=merged_round)
  return Ledger(ledger.base_version, merged_round=merged_round, is_void=True)


def resume(options: LearnerOptions, former: LearnerState) -> LearnerState:
  """What a snapshot tells a new process: its copy, its books, its position."""
  if len(former.ledgers) != options.schedule.num_fragments:
    raise ValueError(
      f'the snapshot has {len(former.ledgers)} fragments, and num_fragments='
      f'{options.schedule.num_fragments}; go on with the config that it was '
      'taken with.'
    )
  # What was in flight has arrived, or has not: the welcome tells.
  ledgers = tuple(ledger._replace(flight=None) for ledger in former.ledgers)
  return initial_state(options)._replace(
    run_id=former.run_id,
    adopted_round=former.adopted_round,
    ledgers=ledgers,
    merged_tokens=former.merged_tokens,
    total_steps=former.total_steps,
    total_tokens=former.total_tokens,
    step_seconds=former.step_seconds,
  )


def _has_arrived(round_: int, fragment: int, welcome: Welcome) -> bool:
  """Whether the syncer holds a hand-over for this round, or has merged it."""
  return (
    round_ in welcome.held_rounds or round_ == welcome.merged_rounds[fragment]
  )


def announce(
  options: LearnerOptions, state: LearnerState, effects: list[Effect]
) -> LearnerState:
  """Tells the syncer, once per incarnation, that rounds may count on it."""
  is_ready = state.is_compiled and state.holds_everything
  if not is_ready or not state.is_connected or state.is_announced:
    return state
  ready = Ready(options.learner, state.incarnation)
  effects.append(Send(options.learner, ready))
  return state._replace(is_announced=True)
