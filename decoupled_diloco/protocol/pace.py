"""The rules that move rounds: start, quorum, grace, merge.

Each rule is `(options, state, now, effects) -> state`; it changes nothing that
is not due, and adds what it decided to `effects`.
"""

from decoupled_diloco.protocol import grace, quorum, rounds
from decoupled_diloco.protocol.effects import (
  Broadcast,
  Discard,
  Effect,
  GraceBegan,
  Merge,
  Notice,
  Send,
)
from decoupled_diloco.protocol.messages import (
  Contribution,
  Reason,
  Refusal,
  RoundOpened,
)
from decoupled_diloco.protocol.rounds import Round, Stage
from decoupled_diloco.protocol.syncer_state import (
  Phase,
  SyncerOptions,
  SyncerState,
)


def start_run(
  options: SyncerOptions, state: SyncerState, now: float, effects: list[Effect]
) -> SyncerState:
  """Opens round 0 when all learners are ready, or enough after a time."""
  if state.phase is not Phase.GATHERING:
    return state
  ready = len(state.ready)
  everybody = ready == options.membership.num_learners
  if not everybody and not (
    now >= start_deadline(options, state)
    and ready >= options.quorum.min_learners
  ):
    return state
  if not everybody:
    effects.append(
      Notice(
        f'Starting with {ready} of {options.membership.num_learners} learners: '
        'the others were not ready within start_timeout_seconds='
        f'{options.membership.start_timeout_seconds:g}. They may join later.'
      )
    )
  effects.append(Broadcast(RoundOpened(0, options.schedule.fragment_of(0))))
  return state._replace(phase=Phase.RUNNING, current=0, paced_at=now)


def start_deadline(options: SyncerOptions, state: SyncerState) -> float:
  """When the run stops waiting for all learners."""
  began_at = state.began_at if state.began_at is not None else 0.0
  return began_at + options.membership.start_timeout_seconds


def advance(
  options: SyncerOptions, state: SyncerState, now: float, effects: list[Effect]
) -> SyncerState:
  """Gives the current round its grace and opens the next, while that is due."""
  if state.phase is not Phase.RUNNING:
    return state
  first = state.current
  while True:
    state = _begin_grace(options, state, now, effects)
    round_ = state.round_of(options, state.current)
    if round_.stage is Stage.OPEN:
      break
    # Without K_min learners that can do something for the next round already,
    # it would only take in those that come while this one's grace lasts.
    returned = rounds.returned(state.rounds, round_.number)
    is_held = len(returned) < options.quorum.min_learners
    if is_held and not _is_over(state, round_, now):
      break
    state = state._replace(current=round_.number + 1, paced_at=round_.quorum_at)
  if state.current != first:
    fragment = options.schedule.fragment_of(state.current)
    # Who has contributed to the round before goes on with this one anyway.
    knowing = tuple(
      learner
      for learner in state.connected
      if state.members[learner].last_round >= state.current - 1
    )
    opened = RoundOpened(state.current, fragment)
    effects.append(Broadcast(opened, knowing))
  return state


def _begin_grace(
  options: SyncerOptions, state: SyncerState, now: float, effects: list[Effect]
) -> SyncerState:
  """Gives the current round its grace if it has its quorum now."""
  round_ = state.round_of(options, state.current)
  if round_.stage is not Stage.OPEN:
    return state
  times = state.return_times(options)
  decision = quorum.decide(
    options.quorum,
    contributors=round_.contributors,
    returned=rounds.returned(state.rounds, round_.number).union(
      learner for learner, at in times.items() if now >= at
    ),
    expected=_still_possible(state, round_),
  )
  if not decision.is_reached:
    return state
  quorum_seconds = round_.quorum_seconds(options.quorum.min_learners)
  if decision.is_unanimous:
    window = grace.GraceDecision(0.0, decision.reason)
  else:
    window = grace.window(
      options.grace,
      state.grace,
      steps_per_scan=options.schedule.steps_per_scan,
      quorum_seconds=quorum_seconds,
      learners=state.connected,
    )
  effects.append(
    GraceBegan(
      round_.number,
      round_.fragment,
      quorum_seconds,
      window.seconds,
      window.reason,
    )
  )
  return state.with_round(
    round_._replace(
      stage=Stage.GRACE, quorum_at=now, deadline=now + window.seconds
    )
  )


def close(state: SyncerState, now: float) -> SyncerState:
  """Closes rounds whose grace has ended, or which everybody is in.

  A round closes at the latest with the next one of its fragment: they are
  merged in order, because a learner that adopts the later one's version takes
  what the earlier one did not merge for its own again.
  """
  closed = set()
  for _, round_ in sorted(state.rounds.items(), reverse=True):
    if round_.stage is Stage.GRACE and (
      _is_over(state, round_, now) or round_.fragment in closed
    ):
      round_ = round_._replace(stage=Stage.CLOSED, closed_at=now)
      state = state.with_round(round_)
    if round_.stage in (Stage.CLOSED, Stage.MERGING):
      closed.add(round_.fragment)
  return state


def merge(
  options: SyncerOptions, state: SyncerState, effects: list[Effect]
) -> SyncerState:
  """Starts the merges of closed rounds, one at a time for each fragment."""
  busy = {
    round_.fragment
    for round_ in state.rounds.values()
    if round_.stage is Stage.MERGING
  }
  for number in sorted(state.rounds):
    round_ = state.rounds[number]
    if round_.stage is not Stage.CLOSED or round_.fragment in busy:
      continue
    version = state.versions[round_.fragment]
    shares, stale = round_.shares(options.staleness, version)
    for entry, objection in stale:
      refuse(entry, Reason.STALE, objection, effects)
      effects.append(Discard(entry.learner, entry.round))
    members = {share.learner for share in shares}
    entries = tuple(
      entry for entry in round_.entries if entry.learner in members
    )
    required = options.quorum.min_learners
    if state.phase is Phase.RUNNING and len(shares) < required:
      for entry in entries:
        detail = f'{len(shares)} of {required} required learners are left'
        refuse(entry, Reason.NO_QUORUM, detail, effects)
        effects.append(Discard(entry.learner, number))
      entries = ()
    if not entries:
      state = _cancel(options, state, number)
      continue
    effects.append(Merge(number, round_.fragment, version + 1, shares))
    busy.add(round_.fragment)
    state = state.with_round(
      round_._replace(stage=Stage.MERGING, entries=entries)
    )
  return state


def refuse(
  entry: Contribution, reason: Reason, detail: str, effects: list[Effect]
) -> None:
  """Tells a learner that its contribution will not be merged."""
  refusal = Refusal(
    learner=entry.learner,
    incarnation=entry.incarnation,
    round=entry.round,
    fragment=entry.fragment,
    reason=reason,
    detail=detail,
  )
  effects.append(Send(entry.learner, refusal))


def _cancel(
  options: SyncerOptions, state: SyncerState, number: int
) -> SyncerState:
  """Forgets a round; but not at once that no publication of it will come."""
  oldest = number - options.rounds_remembered
  kept = {other for other in state.cancelled if other >= oldest}
  return state.without_round(number)._replace(
    cancelled=frozenset(kept | {number})
  )


def _is_over(state: SyncerState, round_: Round, now: float) -> bool:
  """Whether a round's grace has ended, or everybody is in."""
  return (
    now >= round_.deadline
    or _still_possible(state, round_) <= round_.contributors
  )


def _still_possible(state: SyncerState, round_: Round) -> frozenset[int]:
  """The connected learners that are in a round, or could still come in."""
  return frozenset(
    learner
    for learner in state.expected_in(round_.number)
    if learner in round_.contributors
    or state.members[learner].last_round < round_.number
  )
