"""The syncer's decisions, as a pure state machine.

The handlers of events only note what happened. Then the rules of `pace` and
`drain` run over what is known, so that a decision is a function of the state
and of `event.now`, whichever event came last.
"""

from decoupled_diloco.protocol import (
  contributions,
  drain,
  membership,
  pace,
  publishing,
  quorum,
  restart,
)
from decoupled_diloco.protocol.effects import (
  Disconnect,
  Effect,
  Notice,
  Send,
  SendFragments,
  WakeAt,
)
from decoupled_diloco.protocol.events import (
  ConnectionLost,
  Event,
  MergeDone,
  MessageArrived,
  Restarted,
  Saved,
  StopRequested,
  TimePassed,
)
from decoupled_diloco.protocol.machine import Machine
from decoupled_diloco.protocol.messages import (
  Contribution,
  DrainStarted,
  Hello,
  Lacking,
  Rejection,
  RunEnded,
  Welcome,
)
from decoupled_diloco.protocol.rounds import Stage
from decoupled_diloco.protocol.syncer_state import (
  Phase,
  SyncerOptions,
  SyncerState,
  initial_state,
)


def syncer_machine(options: SyncerOptions) -> Machine[SyncerState]:
  """The syncer of a run, as `init` and `step`.

  Events that it takes: `MessageArrived` (from learners), `ConnectionLost`,
  `TimePassed`, `MergeDone`, `Saved`, `StopRequested`; and `Restarted`, first of
  all, if it goes on with a run.
  """

  def step(
    state: SyncerState, event: Event
  ) -> tuple[SyncerState, tuple[Effect, ...]]:
    effects: list[Effect] = []
    if state.began_at is None:
      state = state._replace(began_at=event.now)
    match event:
      case MessageArrived(now=now, message=Hello() as hello):
        state = _admit(options, state, now, hello, effects)
      case MessageArrived(message=Lacking() as lacking):
        state = contributions.listen(options, state, event)
        fragments = tuple(
          p for p in lacking.fragments if 0 <= p < len(state.versions)
        )
        if fragments and not contributions.is_fenced(state, lacking):
          effects.append(SendFragments(lacking.learner, fragments))
      case MessageArrived(message=Contribution()):
        state = contributions.take(options, state, event, effects)
      case MessageArrived():
        state = contributions.listen(options, state, event)
      case ConnectionLost(learner=learner, incarnation=incarnation):
        state = _lose(state, learner, incarnation)
      case MergeDone(round=round_):
        state = publishing.publish(options, state, round_, effects)
      case Restarted():
        state = restart.restore(options, state, event, effects)
      case Saved():
        state = drain.finish(state, event, effects)
      case StopRequested(now=now, reason=reason):
        state = drain.begin(
          options, state, now, reason, effects, has_met_budget=False
        )
      case TimePassed():
        pass
      case _:
        raise ValueError(f'{event} is no event of a syncer.')
    if state.phase is not Phase.FINISHED:
      state = _apply_rules(options, state, event.now, effects)
    return state, tuple(effects)

  return Machine(lambda: initial_state(options), step)


def _admit(
  options: SyncerOptions,
  state: SyncerState,
  now: float,
  hello: Hello,
  effects: list[Effect],
) -> SyncerState:
  objection = membership.objection(
    options.membership,
    state.members,
    hello,
    run_id=options.run_id,
    layout=options.layout,
    versions=state.versions,
  )
  if objection:
    effects.append(Send(hello.learner, Rejection(hello.learner, objection)))
    return state
  state = contributions.reopen_gap(state, hello.learner, effects)
  former = state.members.get(hello.learner)
  if former and former.is_connected:
    # A process that comes back itself says which incarnation it was.
    is_another = hello.incarnation == 0
    effects.append(
      Disconnect(
        hello.learner,
        former.incarnation,
        f'learner {hello.learner} was started again elsewhere'
        if is_another
        else 'superseded by a newer connection',
        is_final=is_another,
      )
    )
  member = membership.admit(
    former,
    now=now,
    incarnation=state.next_incarnation,
    num_fragments=options.schedule.num_fragments,
    is_new_process=hello.incarnation == 0,
  )
  is_ending = state.phase in (Phase.DRAINING, Phase.SAVING)
  held = {
    number: entry
    for number, round_ in sorted(state.rounds.items())
    for entry in round_.entries
    if entry.learner == hello.learner
  }
  welcome = Welcome(
    learner=hello.learner,
    incarnation=member.incarnation,
    run_id=options.run_id,
    round=state.current,
    last_round=member.last_round,
    versions=state.versions,
    merged_rounds=member.merged_rounds,
    total_steps=max(
      [member.merged_steps, *(entry.total_steps for entry in held.values())]
    ),
    total_tokens=max(
      [member.merged_tokens, *(entry.total_tokens for entry in held.values())]
    ),
    held_rounds=tuple(held),
    drain_first=state.current if is_ending else -1,
  )
  effects.append(Send(hello.learner, welcome))
  there = hello.versions or (-1,) * options.schedule.num_fragments
  lacking = tuple(
    fragment
    for fragment, version in enumerate(state.versions)
    if there[fragment] != version
  )
  # Before the fragments: with them, a learner would begin to train.
  if is_ending:
    again = DrainStarted(state.current, state.drain_seconds)
    effects.append(Send(hello.learner, again))
  if lacking:
    effects.append(SendFragments(hello.learner, lacking))
  if state.phase is Phase.FINISHED:
    ended = RunEnded(state.end_reason, not state.has_met_budget)
    effects.append(Send(hello.learner, ended))
  return state.with_member(hello.learner, member)._replace(
    next_incarnation=state.next_incarnation + 1
  )


def _lose(state: SyncerState, learner: int, incarnation: int) -> SyncerState:
  member = state.members.get(learner)
  if member is None or member.incarnation != incarnation:
    return state
  return state.with_member(learner, member._replace(is_connected=False))


def _apply_rules(
  options: SyncerOptions, state: SyncerState, now: float, effects: list[Effect]
) -> SyncerState:
  state = _lose_silent(options, state, now, effects)
  state = pace.start_run(options, state, now, effects)
  state = pace.advance(options, state, now, effects)
  if state.phase is Phase.RUNNING:
    reason = drain.met_budget(options, state)
    if reason:
      state = drain.begin(
        options, state, now, reason, effects, has_met_budget=True
      )
  state = pace.close(state, now)
  state = drain.close(state, now)
  state = pace.merge(options, state, effects)
  state = drain.save(state, effects)
  state = drain.reassure(state, now, effects)
  state = _tell_shortage(options, state, now, effects)
  return _set_alarm(options, state, now, effects)


def _lose_silent(
  options: SyncerOptions, state: SyncerState, now: float, effects: list[Effect]
) -> SyncerState:
  timeout = options.membership.liveness_timeout_seconds
  for learner in state.connected:
    member = state.members[learner]
    # The same sum as in the alarm, so that it never comes a rounding early.
    if now >= member.last_seen + timeout:
      reason = f'silent for {now - member.last_seen:.1f} s'
      effects.append(Disconnect(learner, member.incarnation, reason))
      state = _lose(state, learner, member.incarnation)
  return state


def _tell_shortage(
  options: SyncerOptions, state: SyncerState, now: float, effects: list[Effect]
) -> SyncerState:
  """Says why rounds must wait, once for every change of who is missing."""
  connected = state.connected
  why = None
  if state.phase is Phase.RUNNING:
    why = quorum.shortage(
      options.quorum,
      now=now,
      connected=connected,
      last_seen={
        learner: member.last_seen for learner, member in state.members.items()
      },
    )
  absent = tuple(sorted(set(state.members) - set(connected))) if why else None
  if why and absent != state.absent:
    others = ' The others train on.' if connected else ''
    effects.append(Notice(f'Rounds wait: {why}.{others}'))
  if not why and state.absent is not None:
    effects.append(Notice('Rounds go on: enough learners are connected.'))
  return state._replace(absent=absent)


def _set_alarm(
  options: SyncerOptions, state: SyncerState, now: float, effects: list[Effect]
) -> SyncerState:
  """Asks to be woken when time alone can change something."""
  timeout = options.membership.liveness_timeout_seconds
  times = [state.members[m].last_seen + timeout for m in state.connected]
  times += [
    round_.deadline
    for round_ in state.rounds.values()
    if round_.stage is Stage.GRACE
  ]
  if state.phase is Phase.RUNNING:
    times += state.return_times(options).values()
  if state.phase is Phase.GATHERING:
    times.append(pace.start_deadline(options, state))
  if state.phase in (Phase.DRAINING, Phase.SAVING):
    times += (state.drain_until, state.returning_until)
  future = [at for at in times if at > now]
  pending = state.wake_at if state.wake_at and state.wake_at > now else None
  if not future:
    return state._replace(wake_at=pending)
  # An alarm that comes too early is harmless, so only an earlier one is asked
  # for: heartbeats, which put a learner's deadline off, cost none.
  if pending is None or min(future) < pending:
    pending = min(future)
    effects.append(WakeAt(pending))
  return state._replace(wake_at=pending)
