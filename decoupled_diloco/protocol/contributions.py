"""What learners report, and which of their contributions are accepted."""

from typing import TypeAlias

from decoupled_diloco.protocol import grace, outliers, pace, rounds
from decoupled_diloco.protocol.effects import (
  Accept,
  Discard,
  Disconnect,
  Effect,
  Notice,
)
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

FromLearner: TypeAlias = (
  Contribution | Heartbeat | Ready | Receipt | Lacking | Farewell
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
  if refusal is None:
    state, refusal = _weigh(options, state, entry, event.payload)
  if refusal:
    pace.refuse(entry, *refusal, effects)
    return _note_unsound(options, state, entry, *refusal, effects)
  effects.append(Accept(entry.learner, entry.round))
  member = state.members[entry.learner]
  state = state.with_member(
    entry.learner,
    member._replace(last_round=max(member.last_round, entry.round), unsound=0),
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
  if is_fenced(state, entry):
    return Reason.FENCED, f'incarnation {entry.incarnation} is not connected'
  if entry.fragment != options.schedule.fragment_of(entry.round):
    return (
      Reason.WRONG_FRAGMENT,
      f'round {entry.round} exchanges fragment '
      f'{options.schedule.fragment_of(entry.round)}, not {entry.fragment}',
    )
  if state.phase in (Phase.DRAINING, Phase.SAVING):
    newest_allowed = state.current + options.schedule.num_fragments - 1
  elif state.phase is Phase.RUNNING:
    newest_allowed = options.newest_proposal(state.current)
  else:
    newest_allowed = -1
  timing = rounds.timing_objection(
    state.rounds,
    entry,
    current=state.current,
    merged=state.version_rounds[entry.fragment],
    newest_allowed=newest_allowed,
  )
  member = state.members[entry.learner]
  if 0 <= entry.round == member.merged_rounds[entry.fragment]:
    return Reason.DUPLICATE, f'its part in round {entry.round} was merged'
  if timing and entry.round in state.cancelled:
    # Late for a round means that its publication is near; here none is.
    return Reason.NO_QUORUM, f'round {entry.round} ended without a merge'
  if timing:
    return timing
  is_over = state.phase in (Phase.DRAINING, Phase.SAVING)
  if is_over and entry.round not in state.drain_open:
    return Reason.LATE, f'round {entry.round} of the drain is over'
  if entry.steps <= 0 or entry.tokens <= 0:
    return Reason.EMPTY, f'{entry.steps} steps with {entry.tokens} tokens'
  stale = options.staleness.objection(
    state.versions[entry.fragment], entry.base_version
  )
  if stale:
    return Reason.STALE, stale
  if payload is None or not payload.is_intact:
    return Reason.CORRUPT, 'it was damaged on its way; hand over again'
  if not payload.fits_layout:
    return (
      Reason.WRONG_LAYOUT,
      f'{payload.num_bytes} bytes, framing included, came undamaged, but are '
      f'not of the length of fragment {entry.fragment}: the learner has '
      'another plan or codec than its layout says',
    )
  if payload.norm is None:
    return Reason.NOT_FINITE, 'the delta holds NaN or infinity'
  return None


def _weigh(
  options: SyncerOptions,
  state: SyncerState,
  entry: Contribution,
  payload: PayloadFacts | None,
) -> tuple[SyncerState, tuple[Reason, str] | None]:
  """Refuses what is wildly large; takes the others in as what is usual."""
  assert payload is not None
  assert payload.norm is not None
  version = state.versions[entry.fragment]
  sample = outliers.Sample(version, entry.steps, payload.norm)
  guard = outliers.outlier_guard(options.outliers)
  usual, objection = guard.update(state.outliers, entry.fragment, sample)
  return (
    state._replace(outliers=usual),
    (Reason.OUTLIER, objection) if objection else None,
  )


def _note_unsound(
  options: SyncerOptions,
  state: SyncerState,
  entry: Contribution,
  reason: Reason,
  detail: str,
  effects: list[Effect],
) -> SyncerState:
  """Quarantines a learner whose arithmetic is wrong time and again."""
  if reason not in outliers.UNSOUND:
    return state
  member = state.members[entry.learner]
  if entry.total_steps <= member.unsound_steps:
    return state  # A copy of one that was counted.
  member = member._replace(
    unsound=member.unsound + 1, unsound_steps=entry.total_steps
  )
  if member.unsound == options.outliers.max_refusals:
    why = (
      f'learner {entry.learner} is quarantined: {member.unsound} unsound '
      f'contributions in a row, the last one {reason} ({detail}); look at its '
      'hardware, its data and its inner learning rate, then start it anew.'
    )
    effects.append(Notice(why))
    effects.append(
      Disconnect(entry.learner, member.incarnation, why, is_final=True)
    )
    member = member._replace(is_connected=False, quarantine=why)
  return state.with_member(entry.learner, member)


def reopen_gap(
  state: SyncerState, learner: int, effects: list[Effect]
) -> SyncerState:
  """Lets a returning learner begin again at the first open round it misses.

  A hand-over that was refused just before the link broke leaves a gap. The
  welcome names the learner's newest round only, so it would take the gap for
  filled, and that round might wait for it for ever. Hence what came after the
  gap is let go of: the learner, which still has that work, hands it over again.
  """
  member = state.members.get(learner)
  if member is None or state.phase is not Phase.RUNNING:
    return state
  numbers = range(state.current, member.last_round + 1)
  held = [
    number
    for number in numbers
    if number in state.rounds and learner in state.rounds[number].contributors
  ]
  gap = next((number for number in numbers if number not in held), None)
  if gap is None:
    return state
  for number in held:
    if number > gap:
      round_ = state.rounds[number].without(learner)
      state = state.with_round(round_)
      effects.append(Discard(learner, number))
  return state.with_member(learner, member._replace(last_round=gap - 1))


def is_fenced(state: SyncerState, message: FromLearner) -> bool:
  """Whether a message comes from a life that is over, or was never admitted."""
  member = state.members.get(message.learner)
  return (
    member is None
    or not member.is_connected
    or member.incarnation != message.incarnation
  )


def listen(
  options: SyncerOptions, state: SyncerState, event: MessageArrived
) -> SyncerState:
  """Notes what a message says of its sender, unless that sender is fenced."""
  message = event.message
  if not isinstance(message, FromLearner):
    raise ValueError(f'{type(message).__name__} is no message of a learner.')
  if is_fenced(state, message):
    return state
  member = state.members[message.learner]._replace(
    last_seen=event.now, heard_incarnation=message.incarnation
  )
  match message:
    case Ready():
      member = member._replace(is_ready=True)
    case Farewell(rounds=numbers):
      member = member._replace(farewell=numbers)
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
  closed_at = None
  if isinstance(message, Receipt):
    closed_at = state.closed_at.get(message.round)
  # What a learner is sent when it comes back says nothing of the network.
  if closed_at is not None and closed_at >= member.admitted_at:
    seconds = event.now - closed_at
    state = state._replace(
      grace=grace.observe_sync(options.grace, state.grace, seconds)
    )
  return state.with_member(message.learner, member)
