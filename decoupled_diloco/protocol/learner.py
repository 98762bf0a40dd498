"""A learner's decisions, as a pure state machine.

Everything happens at scan boundaries: the fragment of the next round is handed
over *first* (so that its delta holds the whole scan), then newer versions that
have come in are adopted, then the next scan starts. (With one exception, see
`adoption.before_hand_over`.) Only a learner that waits, joins or drains acts
between boundaries.
"""

from collections.abc import Mapping

from decoupled_diloco.protocol import adoption, hand_over, joining
from decoupled_diloco.protocol.effects import (
  Effect,
  Finish,
  Send,
  StartScan,
  Wait,
  WakeAt,
)
from decoupled_diloco.protocol.events import (
  Compiled,
  ConnectionLost,
  Event,
  HandOverDropped,
  MessageArrived,
  Resumed,
  ScanEnded,
  StopRequested,
  TimePassed,
)
from decoupled_diloco.protocol.learner_state import (
  LearnerOptions,
  LearnerState,
  Phase,
  Staged,
  initial_state,
)
from decoupled_diloco.protocol.machine import Machine
from decoupled_diloco.protocol.messages import (
  DrainStarted,
  Message,
  Publication,
  Receipt,
  Refusal,
  Rejection,
  RoundOpened,
  RunEnded,
  Welcome,
)

# Receipts only tell the syncer how long its publications take: more often than
# this they would cost more than they say.
_RECEIPT_SECONDS = 0.1


def learner_machine(options: LearnerOptions) -> Machine[LearnerState]:
  """One learner of a run, as `init` and `step`.

  Events that it takes: `MessageArrived` (from the syncer), `ConnectionLost`,
  `Compiled`, `ScanEnded`, `HandOverDropped`, `StopRequested`, `TimePassed`; and
  `Resumed`, first of all, if it goes on from a snapshot.
  """

  def step(
    state: LearnerState, event: Event
  ) -> tuple[LearnerState, tuple[Effect, ...]]:
    effects: list[Effect] = []
    if state.phase is Phase.FINISHED:
      return state, ()
    match event:
      case MessageArrived(now=now, message=message):
        state = _hear(options, state, now, message, effects)
      case ConnectionLost():
        state = state._replace(is_connected=False)
      case Resumed(state=former):
        state = joining.resume(options, former)
      case Compiled():
        state = state._replace(is_compiled=True)
      case ScanEnded():
        state = _end_scan(options, state, event, effects)
      case HandOverDropped(round=round_):
        state = hand_over.lose(options, state, round_, effects)
        # In the drain there is no later round for that work: it goes again.
        state = state._replace(drained=state.drained - {round_})
      case StopRequested(reason=reason):
        effects.append(
          Send(options.learner, hand_over.farewell(options, state, reason))
        )
        state = _finish(state, reason, effects)
      case TimePassed(now=now):
        if state.leave_at is not None and now >= state.leave_at:
          state = _finish(
            state, 'the syncer did not end the run in time', effects
          )
      case _:
        raise ValueError(f'{event} is no event of a learner.')
    if state.phase not in (Phase.FINISHED, Phase.TRAINING):
      state = _act_between_scans(options, state, effects)
    return state, tuple(effects)

  return Machine(lambda: initial_state(options), step)


def _hear(
  options: LearnerOptions,
  state: LearnerState,
  now: float,
  message: Message,
  effects: list[Effect],
) -> LearnerState:
  match message:
    case Welcome():
      return joining.enter(options, state, message, effects)
    case RoundOpened(round=round_):
      return state._replace(newest_round=max(state.newest_round, round_))
    case Publication():
      return _stage(options, state, now, message, effects)
    case Refusal():
      return hand_over.take_refusal(options, state, message, effects)
    case DrainStarted(first_round=first, seconds=seconds):
      # Twice the syncer's own limit: it, not the learner, ends the run.
      leave_at = now + 2 * seconds
      effects.append(WakeAt(leave_at))
      return state._replace(drain_first=first, leave_at=leave_at)
    case RunEnded(reason=reason, is_early=is_early):
      return _finish(state, reason, effects, is_early=is_early)
    case Rejection(reason=reason):
      return _finish(state, reason, effects, is_rejected=True)
    case _:
      raise ValueError(f'{type(message).__name__} is no message of a syncer.')


def _stage(
  options: LearnerOptions,
  state: LearnerState,
  now: float,
  publication: Publication,
  effects: list[Effect],
) -> LearnerState:
  """Notes a newer version, to be adopted at the next boundary."""
  p = publication.fragment
  if publication.round >= 0 and now >= state.receipt_due_at:
    receipt = Receipt(options.learner, state.incarnation, publication.round)
    effects.append(Send(options.learner, receipt))
    state = state._replace(receipt_due_at=now + _RECEIPT_SECONDS)
  state = state._replace(
    merged_tokens=max(state.merged_tokens, publication.merged_tokens)
  )
  ledger = state.ledgers[p]
  newest = max(ledger.base_version, _staged_version(state.staged, p))
  if publication.version <= newest:
    return state
  flight = ledger.flight
  if flight and (
    flight.round == publication.merged_round
    or (
      flight.round == publication.round
      and options.learner in publication.contributors
    )
  ):
    state = state.with_ledger(
      p, ledger._replace(flight=flight._replace(is_merged=True))
    )
  staged = Staged(publication.round, publication.version)
  return state._replace(
    staged={**state.staged, p: staged},
    newest_round=max(state.newest_round, publication.round),
  )


def _staged_version(staged: Mapping[int, Staged], fragment: int) -> int:
  return staged[fragment].version if fragment in staged else -1


def _end_scan(
  options: LearnerOptions,
  state: LearnerState,
  event: ScanEnded,
  effects: list[Effect],
) -> LearnerState:
  """The scan boundary: hand over, adopt, start the next scan or wait."""
  state = state._replace(
    phase=Phase.WAITING,
    total_steps=state.total_steps + event.steps,
    total_tokens=state.total_tokens + event.tokens,
    step_seconds=event.seconds / max(event.steps, 1),
    ledgers=tuple(
      ledger._replace(
        steps=ledger.steps + event.steps, tokens=ledger.tokens + event.tokens
      )
      for ledger in state.ledgers
    ),
  )
  if state.drain_first is None:
    state = adoption.before_hand_over(options, state, effects)
    state = hand_over.for_next_round(options, state, effects)
  return state


def _act_between_scans(
  options: LearnerOptions, state: LearnerState, effects: list[Effect]
) -> LearnerState:
  """Adopts what has come, and starts a scan if nothing speaks against it."""
  if not state.is_compiled:
    # What comes meanwhile is adopted afterwards, the newest version alone.
    if state.drain_first is not None:
      return hand_over.everything(options, state, effects)
    return state
  state = adoption.everything(options, state, effects)
  if not state.holds_everything:
    return state
  if state.drain_first is not None:
    return hand_over.everything(options, state, effects)
  state = joining.announce(options, state, effects)
  reason = None
  if state.newest_round < 0:
    reason = 'for the run to start'
  elif (
    options.on_lead_limit == 'wait'
    and state.lead > options.max_rounds_in_flight
  ):
    reason = f'for the publication of round {state.last_round}'
  if reason:
    if reason != state.waits_for:
      effects.append(Wait(reason))
    return state._replace(phase=Phase.WAITING, waits_for=reason)
  step = options.schedule.global_step_of(state.next_round, state.merged_tokens)
  effects.append(StartScan(step))
  return state._replace(phase=Phase.TRAINING, waits_for='')


def _finish(
  state: LearnerState,
  reason: str,
  effects: list[Effect],
  is_rejected: bool = False,
  is_early: bool = False,
) -> LearnerState:
  effects.append(Finish(reason, is_rejected, is_early))
  return state._replace(phase=Phase.FINISHED)
