"""How a learner adopts what has come in, and what its books say afterwards."""

from decoupled_diloco.protocol.effects import Adopt, Effect, Forget
from decoupled_diloco.protocol.learner_state import (
  LearnerOptions,
  LearnerState,
  Ledger,
)


def everything(
  options: LearnerOptions, state: LearnerState, effects: list[Effect]
) -> LearnerState:
  """Adopts the newest version of every fragment that has come in."""
  for fragment in sorted(state.staged):
    state = _adopt(options, state, fragment, effects)
  return state


def before_hand_over(
  options: LearnerOptions, state: LearnerState, effects: list[Effect]
) -> LearnerState:
  """Adopts what is about to be handed over, if only that lets it be.

  While a hand-over of the fragment is in flight, no second one can be made from
  the same base. Where adoption leaves progress in place, the version that
  settles it can be adopted first, and the next delta still holds all of the
  scan. Otherwise the scan would be handed over a scan later (with P = 1:
  every other one). Where adoption overwrites, nothing would be left of it.
  """
  fragment = options.schedule.fragment_of(state.next_round)
  flight, staged = state.ledgers[fragment].flight, state.staged.get(fragment)
  if not options.keeps_progress or flight is None or staged is None:
    return state
  if not flight.is_merged and flight.round > staged.round:
    return state
  return _adopt(options, state, fragment, effects)


def _adopt(
  options: LearnerOptions,
  state: LearnerState,
  fragment: int,
  effects: list[Effect],
) -> LearnerState:
  staged = state.staged[fragment]
  ledger = state.ledgers[fragment]
  flight = ledger.flight
  merged_round = flight.round if flight and flight.is_merged else -1
  effects.append(
    Adopt(staged.round, fragment, staged.version, merged_round, ledger.is_void)
  )
  flight_left = flight
  if flight and (flight.is_merged or flight.round <= staged.round):
    if not flight.is_merged:
      effects.append(Forget(flight.round, fragment))
    flight_left = None
  steps = tokens = 0
  if options.keeps_progress and not ledger.is_void:
    # What no merge has seen stays in the local copy, and on the books.
    seen = flight.contribution if flight and flight.is_merged else None
    steps = ledger.steps - (seen.steps if seen else 0)
    tokens = ledger.tokens - (seen.tokens if seen else 0)
  state = state.with_ledger(
    fragment,
    Ledger(
      staged.version,
      steps,
      tokens,
      flight_left,
      max(merged_round, ledger.merged_round),
    ),
  )
  left = {p: other for p, other in state.staged.items() if p != fragment}
  return state._replace(
    staged=left, adopted_round=max(state.adopted_round, staged.round)
  )
