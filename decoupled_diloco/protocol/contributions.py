"""What learners report, and which of their contributions are accepted."""

from decoupled_diloco.protocol import grace, pace, rounds
from decoupled_diloco.protocol.effects import Accept, Effect
from decoupled_diloco.protocol.events import MessageArrived, PayloadFacts
from decoupled_diloco.protocol.messages import (
  Contribution,
  Farewell,
  Heartbeat,
  Lacking,
  Ready,
  Reason,
  Receipt,
)
from decoupled_diloco.protocol.syncer_state import (
  Phase,
  SyncerOptions,
  SyncerState,
)


def take(
  options: SyncerOptions,
  state: SyncerState,
  event: MessageArrived,
  effects: list[Effect],
) -> SyncerState:
  """Accepts a contribution into its round, or refuses it with the reason."""
  entry = event.message
  assert isinstance(entry, Contribution)
  refusal = _objection(options, state, entry, event.payload)
  state = listen(options, state, event)
  if refusal:
    pace.refuse(entry, *refusal, effects)
    return state
  effects.append(Accept(entry.learner, entry.round))
  member = state.members[entry.learner]
  state = state.with_member(
    entry.learner,
    member._replace(last_round=max(member.last_round, entry.round)),
  )
  round_ = state.round_of(options, entry.round)
  return state.with_round(round_.with_entry(event.now, entry))


def _objection(
  options: SyncerOptions,
  state: SyncerState,
  entry: Contribution,
  payload: PayloadFacts | None,
) -> tuple[Reason, str] | None:
  """Why a contribution is refused; None if it is accepted."""
  member = state.members.get(entry.learner)
  if (
    member is None
    or not member.is_connected
    or member.incarnation != entry.incarnation
  ):
    return Reason.FENCED, f'incarnation {entry.incarnation} is not connected'
  if entry.fragment != options.schedule.fragment_of(entry.round):
    return (
      Reason.WRONG_FRAGMENT,
      f'round {entry.round} exchanges fragment '
      f'{options.schedule.fragment_of(entry.round)}, not {entry.fragment}',
    )
  if state.phase is Phase.DRAINING:
    newest_allowed = state.current + options.schedule.num_fragments - 1
  elif state.phase is Phase.RUNNING:
    newest_allowed = state.current + options.max_rounds_in_flight + 1
  else:
    newest_allowed = -1
  timing = rounds.timing_objection(
    state.rounds, entry, current=state.current, newest_allowed=newest_allowed
  )
  if timing:
    return timing
  if entry.steps <= 0 or entry.tokens <= 0:
    return Reason.EMPTY, f'{entry.steps} steps with {entry.tokens} tokens'
  stale = options.staleness.objection(
    state.versions[entry.fragment], entry.base_version
  )
  if stale:
    return Reason.STALE, stale
  if payload is None or not payload.is_intact:
    return Reason.CORRUPT, 'checksum or length mismatch; hand over again'
  if payload.norm is None:
    return Reason.NOT_FINITE, 'the delta holds NaN or infinity'
  return None


def listen(
  options: SyncerOptions, state: SyncerState, event: MessageArrived
) -> SyncerState:
  """Notes what a message says of its sender, unless that sender is fenced."""
  message = event.message
  if not isinstance(
    message, Contribution | Heartbeat | Ready | Receipt | Lacking | Farewell
  ):
    raise ValueError(f'{type(message).__name__} is no message of a learner.')
  member = state.members.get(message.learner)
  if (
    member is None
    or not member.is_connected
    or member.incarnation != message.incarnation
  ):
    return state
  member = member._replace(last_seen=event.now)
  match message:
    case Ready():
      member = member._replace(is_ready=True)
    case Farewell():
      member = member._replace(is_done=True)
    case Contribution() | Heartbeat():
      member = member._replace(
        total_steps=max(member.total_steps, message.total_steps),
        total_tokens=max(member.total_tokens, message.total_tokens),
      )
  if isinstance(message, Contribution) and message.step_seconds > 0:
    state = state._replace(
      grace=grace.observe_step(
        options.grace, state.grace, message.learner, message.step_seconds
      )
    )
  if isinstance(message, Receipt) and message.round in state.closed_at:
    seconds = event.now - state.closed_at[message.round]
    state = state._replace(
      grace=grace.observe_sync(options.grace, state.grace, seconds)
    )
  return state.with_member(message.learner, member)
