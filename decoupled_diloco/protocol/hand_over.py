"""What a learner hands over, and what becomes of it."""

from decoupled_diloco.protocol.effects import (
  Effect,
  Forget,
  HandOver,
  Notice,
  Resend,
  Send,
)
from decoupled_diloco.protocol.learner_state import (
  Flight,
  LearnerOptions,
  LearnerState,
  Phase,
)
from decoupled_diloco.protocol.messages import (
  Contribution,
  Farewell,
  Reason,
  Refusal,
)

# How often a corrupted hand-over is sent again before it counts as lost.
MAX_RESENDS = 3

# What these reasons refuse was a copy, or came over a connection that is no
# longer the learner's: the syncer may hold the hand-over all the same.
_KEEPING = (Reason.DUPLICATE, Reason.FENCED)


def for_next_round(
  options: LearnerOptions, state: LearnerState, effects: list[Effect]
) -> LearnerState:
  """At a scan boundary: hands over for the round that is next, if it may."""
  if not state.is_connected or not state.is_announced or state.newest_round < 0:
    return state
  number = state.next_round
  # At the limit a learner that trains on keeps its work for a later round. One
  # that waits has not come here with more than the limit in flight.
  if options.on_lead_limit == 'train' and _exceeds_lead(options, state, number):
    return state
  return _hand_over(options, state, number, effects)


def _exceeds_lead(
  options: LearnerOptions, state: LearnerState, number: int
) -> bool:
  """Whether handing this round over leads by more than the limit.

  Versions that are staged count as adopted, because at this same boundary they
  will be. Otherwise a slow learner, for which many rounds go by in a scan,
  would seem to lead for ever and never hand anything over.
  """
  staged = (staged.round for staged in state.staged.values())
  adopted_round = max([state.adopted_round, *staged])
  return number - adopted_round > options.max_rounds_in_flight


def _hand_over(
  options: LearnerOptions,
  state: LearnerState,
  number: int,
  effects: list[Effect],
) -> LearnerState:
  """Hands the fragment of a round over, if it holds work nobody was given."""
  fragment = options.schedule.fragment_of(number)
  ledger = state.ledgers[fragment]
  # While an earlier hand-over of this fragment may still be merged, a second
  # one from the same base would count its work twice.
  if ledger.steps == 0 or ledger.flight is not None or ledger.is_void:
    return state
  contribution = Contribution(
    learner=options.learner,
    incarnation=state.incarnation,
    round=number,
    fragment=fragment,
    base_version=ledger.base_version,
    steps=ledger.steps,
    tokens=ledger.tokens,
    total_steps=state.total_steps,
    total_tokens=state.total_tokens,
    step_seconds=state.step_seconds,
    # With a higher limit it waits for an earlier round, and comes back after
    # this one without its publication.
    is_waiting=state.drain_first is None
    and options.on_lead_limit == 'wait'
    and options.max_rounds_in_flight == 0,
  )
  effects.append(HandOver(contribution))
  state = state.with_ledger(
    fragment, ledger._replace(flight=Flight(number, contribution))
  )
  return state._replace(
    last_round=max(state.last_round, number), missed=state.missed - {number}
  )


def take_refusal(
  options: LearnerOptions,
  state: LearnerState,
  refusal: Refusal,
  effects: list[Effect],
) -> LearnerState:
  """Sends a corrupted hand-over again, and lets go of any other."""
  flight = state.ledgers[refusal.fragment].flight
  if (
    flight is None
    or flight.round != refusal.round
    or flight.is_merged
    or refusal.reason in _KEEPING
    or refusal.incarnation != flight.contribution.incarnation
  ):
    return state
  if refusal.reason is Reason.CORRUPT and flight.resends < MAX_RESENDS:
    effects.append(Resend(flight.contribution))
    flight = flight._replace(resends=flight.resends + 1)
    ledger = state.ledgers[refusal.fragment]._replace(flight=flight)
    return state.with_ledger(refusal.fragment, ledger)
  effects.append(
    Notice(
      f'round {refusal.round}, fragment {refusal.fragment} refused '
      f'({refusal.reason}): {refusal.detail}'
    )
  )
  is_round_free = refusal.reason is not Reason.LATE
  return lose(options, state, refusal.round, effects, is_round_free)


def lose(
  options: LearnerOptions,
  state: LearnerState,
  round_: int,
  effects: list[Effect],
  is_round_free: bool = True,
) -> LearnerState:
  """A hand-over will not be merged; its work stays in the local copy."""
  fragment = options.schedule.fragment_of(round_)
  ledger = state.ledgers[fragment]
  if ledger.flight is None or ledger.flight.round != round_:
    return state
  effects.append(Forget(round_, fragment))
  state = state.with_ledger(fragment, ledger._replace(flight=None))
  if is_round_free:
    # The syncer holds nothing of this learner for that round, which may still
    # be open: it is the next one again.
    missed = {r for r in state.missed | {round_} if r >= state.newest_round}
    state = state._replace(missed=frozenset(missed))
    if round_ == state.last_round and round_ not in missed:
      # Nor is there a publication that a learner at its limit could wait for.
      state = state._replace(last_round=round_ - 1)
  # A farewell that announced this round no longer holds.
  return state._replace(has_said_farewell=False)


def everything(
  options: LearnerOptions, state: LearnerState, effects: list[Effect]
) -> LearnerState:
  """Hands everything over once more, each fragment when it is settled."""
  assert state.drain_first is not None
  first, P = state.drain_first, options.schedule.num_fragments
  for number in range(first, first + P):
    if state.is_connected and number not in state.drained:
      before = state
      state = _hand_over(options, state, number, effects)
      if state is not before:
        state = state._replace(drained=state.drained | {number})
  is_settled = all(
    ledger.steps == 0
    or ledger.is_void
    or (ledger.flight and ledger.flight.round >= first)
    or any(
      options.schedule.fragment_of(number) == fragment
      for number in state.drained
    )
    for fragment, ledger in enumerate(state.ledgers)
  )
  if state.is_connected and is_settled and not state.has_said_farewell:
    effects.append(Send(options.learner, farewell(options, state, 'drained')))
    state = state._replace(has_said_farewell=True)
  return state._replace(phase=Phase.DRAINING)


def farewell(
  options: LearnerOptions, state: LearnerState, reason: str
) -> Farewell:
  """Nothing will come from this learner but what is on its way."""
  flights = (ledger.flight for ledger in state.ledgers)
  rounds = sorted(flight.round for flight in flights if flight)
  return Farewell(options.learner, state.incarnation, reason, tuple(rounds))
