"""A syncer that was killed goes on with what was durable."""

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.records import from_json, to_json
from decoupled_diloco.protocol.syncer_state import BudgetOptions, Phase
from tests.protocol.scripts import SyncerScript, messages

MEMBERSHIP = MembershipOptions(
  num_learners=2, heartbeat_seconds=1.0, liveness_timeout_seconds=10.0
)


def make(joined=2, **overrides) -> SyncerScript:
  return SyncerScript(
    joined, **({'M': 2, 'membership': MEMBERSHIP} | overrides)
  )


def merge_round(syncer: SyncerScript, round_: int, *learners: int):
  """Has these learners contribute; returns the state when the merge began."""
  for m in learners or (0, 1):
    syncer.contribute(m, round_)
  assert [merge.round for merge in syncer.effects(fx.Merge)][-1] == round_
  return syncer.state


def restarted(state, merged=(), *, life=2, now=100.0, **overrides):
  """A new process, of the same run."""
  syncer = make(joined=0, **overrides)
  syncer.tell(ev.Restarted(now, life, state, merged))
  return syncer


def test_nothing_was_durable():
  syncer = restarted(None)
  assert syncer.state.phase is Phase.GATHERING
  for m in range(2):
    syncer.join(m)
  assert syncer.when(msg.RoundOpened) == 100.0


def test_versions_and_counters_are_those_of_the_durable_merges():
  syncer = make()
  state = merge_round(syncer, 0)
  syncer.done(0)
  live = syncer.state
  back = restarted(state, (0,)).state
  assert back.versions == live.versions == (1, 0, 0, 0, 0, 0)
  assert back.version_rounds == live.version_rounds
  assert back.rounds_merged == live.rounds_merged == 1
  assert back.merged_tokens == live.merged_tokens > 0
  assert back.phase is Phase.RUNNING
  assert back.current == live.current
  for m in range(2):
    assert back.members[m].merged_rounds == live.members[m].merged_rounds


def test_a_merge_that_was_not_durable_is_undone():
  syncer = make()
  state = merge_round(syncer, 0)
  back = restarted(state)
  assert back.state.versions == (0,) * 6
  assert back.state.rounds == {}
  back.join(0, run_id='run', incarnation=1, versions=(0,) * 6)
  (welcome,) = [
    message
    for _, effects in back.tape
    for message in messages(effects)
    if isinstance(message, msg.Welcome)
  ]
  # What it has handed over for round 0 is gone.
  assert welcome.held_rounds == ()
  assert welcome.merged_rounds == (-1,) * 6


def test_several_merges_of_different_fragments():
  syncer = make()
  merge_round(syncer, 0)
  state = merge_round(syncer, 1)
  assert {r.number for r in state.rounds.values()} == {0, 1}
  back = restarted(state, (0, 1)).state
  assert back.versions == (1, 1, 0, 0, 0, 0)
  assert back.rounds_merged == 2


def test_no_incarnation_is_given_twice():
  syncer = make()
  state = merge_round(syncer, 0)
  given = set(syncer.incarnations.values())
  syncer.done(0)
  syncer.join(0)  # Another life, of which the durable state knows nothing.
  given.add(syncer.incarnations[0])
  back = restarted(state, (0,))
  back.join(0)
  assert back.incarnations[0] > max(given)
  third = restarted(state, (0,), life=3)
  third.join(0)
  assert third.incarnations[0] > back.incarnations[0] + 1000


def test_a_learner_that_holds_more_is_turned_away():
  syncer = make()
  state = merge_round(syncer, 0)
  back = restarted(state)
  effects = back.hello(0, run_id='run', incarnation=1, versions=(1,) + (0,) * 5)
  (rejection,) = messages(effects)
  assert isinstance(rejection, msg.Rejection)
  assert 'has lost progress' in rejection.reason


def test_learners_that_come_back_go_on_with_the_current_round():
  syncer = make()
  state = merge_round(syncer, 0)
  back = restarted(state, (0,))
  for m in range(2):
    back.join(m, run_id='run', incarnation=m + 1)
    assert back.state.members[m].last_round == 0
  merge_round(back, 1)
  back.done(1)
  assert back.state.versions == (1, 1, 0, 0, 0, 0)


def _draining(**budget) -> tuple[SyncerScript, ev.Restarted]:
  """Both learners are in the first of the drain's two rounds; it is merged."""
  options = {
    'P': 2,
    'H': 2,
    'budget': BudgetOptions(drain_seconds=30.0, **({'rounds': 1} | budget)),
  }
  syncer = make(**options)
  merge_round(syncer, 0)
  syncer.done(0)
  assert syncer.state.phase is Phase.DRAINING
  first = syncer.state.current
  for m in range(2):
    syncer.contribute(m, first)
  state = syncer.state
  back = make(joined=0, **options)
  return back, ev.Restarted(100.0, 2, state, (first,))


def test_the_drain_waits_for_those_who_were_there():
  back, event = _draining()
  first = event.merged[0]
  back.tell(event)
  assert back.state.phase is Phase.DRAINING
  assert back.state.drain_open == {first + 1}
  assert not back.effects(fx.Save)
  back.join(0, run_id='run', incarnation=1)
  back.contribute(0, first + 1)
  assert not back.effects(fx.Save)
  back.join(1, run_id='run', incarnation=2)
  back.contribute(1, first + 1)
  back.done(first + 1)
  assert back.effects(fx.Save)


def test_the_drain_does_not_wait_for_ever():
  back, event = _draining()
  back.tell(event)
  back.join(0, run_id='run', incarnation=1)
  back.contribute(0, event.merged[0] + 1)
  # Not longer than the silence of a learner may last.
  for _ in range(9):
    back.wait(1.0)
    back.say(msg.Heartbeat(0, back.incarnations[0], 'draining', 1, 100, 1.0))
  assert not back.effects(fx.Merge)
  back.wait(1.1)
  assert back.effects(fx.Merge)


def test_a_run_that_was_stopped_trains_on():
  syncer = make(P=2, H=2)
  merge_round(syncer, 0)
  syncer.done(0)
  syncer.tell(ev.StopRequested(5.0, 'enough'))
  first = syncer.state.current
  for m in range(2):
    syncer.contribute(m, first)
  state = syncer.state
  assert state.phase is Phase.DRAINING
  back = restarted(state, (first,), P=2, H=2)
  assert back.state.phase is Phase.RUNNING
  assert back.state.current == first + 1
  assert back.state.end_reason == ''
  for m in range(2):
    back.join(m)
  merge_round(back, first + 1)


def test_a_larger_budget_lets_a_finished_run_go_on():
  _, event = _draining()
  further = make(joined=0, P=2, H=2, budget=BudgetOptions(rounds=1000))
  further.tell(event)
  assert further.state.phase is Phase.RUNNING
  assert further.state.current == event.merged[0] + 1


def test_another_number_of_fragments():
  syncer = make()
  state = merge_round(syncer, 0)
  with pytest.raises(ValueError, match='the config that it was begun with'):
    restarted(state, P=3, H=3)


def test_the_event_survives_json():
  syncer = make()
  state = merge_round(syncer, 0)
  event = ev.Restarted(1.5, 2, state, (0,))
  assert from_json(to_json(event)) == event
