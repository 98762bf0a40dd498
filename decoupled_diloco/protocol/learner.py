"""A learner's decisions, as a pure state machine.

Everything happens at scan boundaries: the fragment of the next round is handed
over *first* (so that its delta holds the whole scan), then newer versions that
have come in are adopted, then the next scan starts. (With one exception, see
`adoption.before_hand_over`.) Only a learner that waits, joins or drains acts
between boundaries.
"""

from collections.abc import Mapping

from decoupled_diloco.protocol import adoption, hand_over
from decoupled_diloco.protocol.effects import (
  Effect,
  Finish,
  Forget,
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
  Ledger,
  Phase,
  Staged,
  initial_state,
)
from decoupled_diloco.protocol.machine import Machine
from decoupled_diloco.protocol.messages import (
  DrainStarted,
  Message,
  Publication,
  Ready,
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
        state = _resume(options, former)
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
      return _enter(options, state, message, effects)
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


def _enter(
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
  return _announce(options, state, effects)


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


def _resume(options: LearnerOptions, former: LearnerState) -> LearnerState:
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


def _announce(
  options: LearnerOptions, state: LearnerState, effects: list[Effect]
) -> LearnerState:
  """Tells the syncer, once per incarnation, that rounds may count on it."""
  is_ready = state.is_compiled and state.holds_everything
  if not is_ready or not state.is_connected or state.is_announced:
    return state
  ready = Ready(options.learner, state.incarnation)
  effects.append(Send(options.learner, ready))
  return state._replace(is_announced=True)


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
  state = _announce(options, state, effects)
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
