"""How a run ends: nothing is lost, and nobody holds it up."""

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.messages import Reason
from decoupled_diloco.protocol.syncer_state import BudgetOptions, Phase
from tests.protocol.cluster import TOKENS_PER_STEP, Cluster, syncer_options
from tests.protocol.scripts import (
  LearnerScript,
  SyncerScript,
  handed_over,
  messages,
  reasons,
)


def _cluster(speeds, *, drain_seconds=1000.0, rounds=6, k_min=1, **settings):
  """P=3 and K=1; scans take exactly `speeds` seconds, and grace is short."""
  options = syncer_options(
    M=len(speeds),
    k_min=k_min,
    H=3,
    P=3,
    grace=GraceOptions(cap_seconds=0.5),
    budget=BudgetOptions(rounds, 0, drain_seconds, stop_seconds=drain_seconds),
  )
  scans = [lambda seconds=seconds: seconds for seconds in speeds]
  return Cluster(options, scans, **settings)


def _ended(cluster):
  return cluster.when(msg.RunEnded)


@pytest.mark.parametrize('k_min', [1, 2])
def test_merged_tokens_by_hand(k_min):
  cluster = _cluster([1.0, 1.0], k_min=k_min).run()
  # Scan n hands fragment (n - 1) mod 3 over. Its merge comes while scan n + 1
  # runs, so that is overwritten when the version is adopted. With six rounds
  # the drain begins in scan 7, at whose end all is handed over once more:
  #   fragment 0: scan 1 | scans 3, 4 | scans 6, 7      lost: 2 and 5
  #   fragment 1: scans 1, 2 | scans 4, 5 | scan 7      lost: 3 and 6
  #   fragment 2: scans 1, 2, 3 | scans 5, 6            lost: 4 and 7
  # Five scans of 100 tokens for each fragment and learner, of seven.
  assert [learner.figures.scans for learner in cluster.learners] == [7, 7]
  merged = cluster.merged_tokens()
  assert merged == {(m, p): 500 for m in (0, 1) for p in range(3)}
  # Each fragment credits a third: 2 learners x 3 fragments x 500 / 3.
  assert cluster.syncer_state.merged_tokens == pytest.approx(1000)


@pytest.mark.parametrize('latency', [0.0, 0.4, 1.7])
@pytest.mark.parametrize('bulk_seconds', [0.0, 0.3, 2.5])
@pytest.mark.parametrize('k_min', [1, 2, 3])
def test_with_rebase_everything_is_merged(latency, bulk_seconds, k_min):
  # Hand-overs are on their way when the drain begins, and messages without a
  # payload overtake those with one.
  cluster = _cluster(
    [1.0, 1.3, 2.2],
    k_min=k_min,
    rounds=9,
    latency=latency,
    bulk_seconds=bulk_seconds,
    merge_seconds=0.2,
    keeps_progress=True,
  ).run()
  processed = {
    (m, p): TOKENS_PER_STEP * learner.figures.scans
    for m, learner in enumerate(cluster.learners)
    for p in range(3)
  }
  assert cluster.merged_tokens() == processed
  # And long before the time is up.
  drained = _ended(cluster) - cluster.when(msg.DrainStarted)
  assert drained < 2.2 + 6 * (latency + bulk_seconds) + 1.0


def test_a_budget_in_merged_tokens():
  budget = BudgetOptions(merged_tokens=400)
  options = syncer_options(M=2, H=3, P=3, budget=budget)
  cluster = Cluster(options, [lambda: 1.0] * 2).run()
  # Both learners' parts, a third of their tokens each: round 0 holds 1 step,
  # 1 2, 2 3, and the following 2 (see above): 200/3 x (1 + 2 + 3) = 400.
  assert cluster.end == fx.Finish('400 merged tokens')
  ordinary = [m for m in cluster.effects(fx.Merge) if m.round <= 2]
  assert len(ordinary) == 3
  assert cluster.syncer_state.merged_tokens >= 400
  # Round 3 comes after the drain began: it is not of the ordinary ones.
  assert cluster.merges_of(3) == []


def test_a_dead_learner_holds_nobody_up():
  cluster = _cluster([1.0, 1.0], k_min=2, rounds=50, keeps_progress=True)
  cluster.at(3.5, lambda: cluster.kill(1))
  stop = ev.StopRequested(10.5, 'SIGTERM')
  cluster.at(10.5, lambda: cluster.syncer.tell(stop))
  cluster.run()
  assert cluster.end == fx.Finish('SIGTERM')
  # One of two required learners: rounds waited, and it trained on until the end
  # of the scan in which it heard of the drain. All that is merged.
  assert cluster.learners[0].figures.scans == 11
  merged = cluster.merged_tokens()
  assert [merged[0, p] for p in range(3)] == [1100] * 3
  assert _ended(cluster) == pytest.approx(11.0)


def test_a_learner_that_hangs_is_waited_for_until_the_time_is_up():
  cluster = _cluster([1.0, 1.0], drain_seconds=30.0, keeps_progress=True)
  hangs = cluster.learners[1]
  cluster.at(3.5, lambda: setattr(hangs, 'scan_seconds', lambda: 1e6))
  cluster.run(until=1e5)
  assert _ended(cluster) - cluster.when(msg.DrainStarted) == 30.0
  merged = cluster.merged_tokens()
  assert all(
    merged[0, p] == 100 * cluster.learners[0].figures.scans for p in range(3)
  )


def test_a_learner_that_finished_early_holds_nobody_up():
  cluster = _cluster([1.0, 1.0], rounds=9, keeps_progress=True)
  leave = ev.StopRequested(4.0, 'preempted')
  cluster.at(4.2, lambda: cluster.learners[1].tell(leave))
  cluster.run()
  assert cluster.learners[1].end == fx.Finish('preempted')
  assert _ended(cluster) - cluster.when(msg.DrainStarted) <= 1.0
  assert len(cluster.effects(fx.Merge)) >= 9


@pytest.mark.parametrize('bulk_seconds', [0.0, 3.0])
def test_a_learner_comes_back_in_the_drain(bulk_seconds):
  # Learner 1 is in a long scan while the run drains, so there is time.
  cluster = _cluster(
    [1.0, 60.0],
    rounds=1000,
    keeps_progress=True,
    latency=0.1,
    bulk_seconds=bulk_seconds,
  )
  stop = ev.StopRequested(30.0, 'enough')
  cluster.at(30.0, lambda: cluster.syncer.tell(stop))
  # What learner 0 then hands over has arrived, or is lost on its way.
  cluster.at(32.0, lambda: cluster.partition(0))
  cluster.at(33.0, lambda: cluster.heal(0))
  cluster.run()
  merged = cluster.merged_tokens()
  for m, learner in enumerate(cluster.learners):
    for p in range(3):
      assert merged[m, p] == 100 * learner.figures.scans
  # It ends with learner 1's scan, not when the time is up.
  assert _ended(cluster) < 60.0 + 10 * (0.1 + bulk_seconds)


def test_a_learner_that_joins_in_the_drain_leaves_again():
  cluster = _cluster([1.0, 20.0, 1.0], latency=0.1)
  cluster.at(2.5, lambda: cluster.kill(2))
  cluster.at(13.0, lambda: cluster.start(2))
  # Even if its link breaks once it has said farewell: it says so again.
  cluster.at(15.0, lambda: cluster.partition(2))
  cluster.at(16.0, lambda: cluster.heal(2))
  cluster.run()
  assert cluster.learners[2].end == cluster.learners[0].end
  assert cluster.learners[2].figures.scans == 2  # All before it was killed.
  assert _ended(cluster) < 22.0


def test_a_learner_that_hears_no_end_leaves_by_itself():
  cluster = _cluster([1.0, 20.0], drain_seconds=50.0)
  cluster.at(13.0, lambda: cluster.partition(0))
  cluster.run(until=500.0)
  end = cluster.learners[0].end
  assert end is not None
  assert 'did not end the run in time' in end.reason


def _stopped(syncer):
  effects = syncer.tell(ev.StopRequested(syncer.now, 'SIGTERM'))
  return [type(m) for m in messages(effects)], effects


def test_stopped_before_anybody_came():
  syncer = SyncerScript(M=2)
  kinds, effects = _stopped(syncer)
  assert kinds == [msg.DrainStarted]
  assert fx.Save('SIGTERM') in effects
  assert fx.Finish('SIGTERM') in syncer.saved()


def test_stopped_while_learners_gather():
  syncer = SyncerScript(M=2, joined=1)
  kinds, _ = _stopped(syncer)
  assert kinds == [msg.DrainStarted]
  farewell = msg.Farewell(0, syncer.incarnations[0], 'drained')
  assert fx.Save('SIGTERM') in syncer.say(farewell)


def test_stopped_twice_or_after_the_end_changes_nothing():
  syncer = SyncerScript(M=1, joined=1)
  _stopped(syncer)
  assert _stopped(syncer)[0] == []
  syncer.say(msg.Farewell(0, syncer.incarnations[0], 'drained'))
  assert syncer.state.phase is Phase.SAVING
  assert _stopped(syncer)[0] == []
  syncer.saved()
  assert syncer.state.phase is Phase.FINISHED
  assert _stopped(syncer)[1] == ()


def test_who_comes_after_the_end_is_sent_home():
  syncer = SyncerScript(M=2, joined=1)
  _stopped(syncer)
  syncer.say(msg.Farewell(0, syncer.incarnations[0], 'drained'))
  syncer.saved()
  kinds = [type(m) for m in messages(syncer.hello(1))]
  assert kinds == [msg.Welcome, msg.RunEnded]


def test_rounds_without_a_quorum_are_handed_over_again():
  syncer = SyncerScript(M=3, k_min=2, joined=3)
  syncer.contribute(0, 0)
  syncer.contribute(1, 0)  # A quorum, but nobody has come back yet.
  syncer.contribute(0, 1)
  _, effects = _stopped(syncer)
  assert [e.round for e in effects if isinstance(e, fx.Merge)] == [0]
  assert reasons(effects) == [Reason.DRAINING]
  assert fx.Discard(0, 1) in effects


def test_what_is_on_its_way_is_not_taken_for_the_last_word():
  syncer = SyncerScript(M=2, joined=2)
  syncer.contribute(0, 0)
  _, effects = _stopped(syncer)
  first = next(
    m.first_round for m in messages(effects) if isinstance(m, msg.DrainStarted)
  )
  # The limit is 4: while round 0 is open, round 5 may be proposed.
  assert first == 6
  assert reasons(syncer.contribute(1, 5)) == [Reason.LATE]
  assert not reasons(syncer.contribute(1, 6))


def test_a_round_of_the_drain_is_merged_once():
  syncer = SyncerScript(M=2, joined=2)
  _stopped(syncer)
  first = syncer.state.current
  farewell = msg.Farewell(1, syncer.incarnations[1], 'drained')
  syncer.say(farewell)
  syncer.contribute(0, first)
  assert len(syncer.merges_of(first)) == 1
  syncer.done(first)
  # A copy, and somebody who had said farewell.
  assert reasons(syncer.contribute(0, first)) == [Reason.DUPLICATE]
  assert reasons(syncer.contribute(1, first)) == [Reason.LATE]
  syncer.merged_tokens()


def test_who_said_farewell_may_have_something_on_its_way():
  syncer = SyncerScript(M=2, joined=2)
  _stopped(syncer)
  first = syncer.state.current
  for m, rounds in ((0, ()), (1, (first,))):
    syncer.say(msg.Farewell(m, syncer.incarnations[m], 'drained', rounds))
  assert syncer.state.phase is Phase.DRAINING
  syncer.contribute(1, first)
  assert fx.Save('SIGTERM') in syncer.done(first)


def _saving(**overrides):
  """Everybody has drained, and nothing is left to merge."""
  syncer = SyncerScript(M=2, joined=2, **overrides)
  _stopped(syncer)
  for m in (0, 1):
    syncer.say(msg.Farewell(m, syncer.incarnations[m], 'drained'))
  assert syncer.state.phase is Phase.SAVING
  return syncer


def test_the_end_is_told_after_the_final_checkpoint_is_saved():
  syncer = _saving()
  assert len(syncer.effects(fx.Save)) == 1
  assert not [m for m in syncer.effects(fx.Broadcast) if _is_end(m)]
  effects = syncer.saved()
  assert effects == (
    fx.Broadcast(msg.RunEnded('SIGTERM', is_early=True)),
    fx.Finish('SIGTERM'),
  )


def _is_end(broadcast):
  return isinstance(broadcast.message, msg.RunEnded)


def test_a_checkpoint_that_cannot_be_saved_is_a_failure():
  syncer = _saving()
  effects = syncer.saved(error='no space left on device')
  reason = 'SIGTERM, but the final checkpoint is lost: no space left on device'
  assert effects == (
    fx.Broadcast(msg.RunEnded(reason, is_early=True)),
    fx.Finish(reason, is_failure=True),
  )
  (_, ended) = messages(syncer.hello(1))  # Whoever comes later hears it, too.
  assert ended == msg.RunEnded(reason, is_early=True)


def test_saved_without_having_been_asked_is_an_error():
  with pytest.raises(ValueError, match='without a `Save`'):
    SyncerScript(M=1, joined=1).saved()


def test_learners_are_told_to_wait_for_as_long_as_the_saving_takes():
  budget = BudgetOptions(rounds=10, stop_seconds=4.0)
  syncer = _saving(budget=budget)
  learner = LearnerScript(P=4)
  learner.hear(msg.DrainStarted(9, 4.0))
  # A learner gives up after 8 s. The syncer speaks every 4 s, for 40 s.
  for n in range(1, 11):
    effects = syncer.tell(ev.TimePassed(4.0 * n))
    (again,) = messages(effects)
    assert again == msg.DrainStarted(syncer.state.current, 4.0)
    assert syncer.state.wake_at == 4.0 * (n + 1)
    learner.now = 4.0 * n
    learner.hear(msg.DrainStarted(9, 4.0))
    assert not learner.tell(ev.TimePassed(4.0 * n + 3.9))
  assert learner.tell(ev.TimePassed(48.0)) != ()


def test_who_comes_while_the_run_is_saved_is_told_to_wait():
  syncer = _saving()
  syncer.lose(1)
  kinds = [type(m) for m in messages(syncer.hello(1))]
  assert kinds == [msg.Welcome, msg.DrainStarted]
  # And what it hands over comes too late.
  first = syncer.state.current
  assert reasons(syncer.contribute(1, first)) == [Reason.LATE]


def test_saving_may_take_longer_than_learners_would_wait():
  cluster = _cluster([1.0, 1.3], drain_seconds=5.0)
  cluster.syncer.save_seconds = 100.0
  cluster.run()
  assert cluster.end == fx.Finish('6 rounds')
  assert _ended(cluster) - cluster.when(msg.DrainStarted) > 100.0
  for learner in cluster.learners:
    assert learner.end == cluster.end


def test_a_round_that_nobody_could_join_is_over():
  syncer = SyncerScript(M=2, joined=2)
  _stopped(syncer)
  first = syncer.state.current
  for m, rounds in ((0, (first + 1,)), (1, ())):
    syncer.say(msg.Farewell(m, syncer.incarnations[m], 'drained', rounds))
  assert reasons(syncer.contribute(0, first)) == [Reason.LATE]
  assert not reasons(syncer.contribute(0, first + 1))


def _draining(**settings):
  """Rounds 0 and 1 are in the air; the drain's rounds are 9 to 12."""
  learner = LearnerScript(P=4, limit=8, **settings)
  for _ in range(3):
    learner.scan()
  learner.refuse(2, Reason.LATE)
  learner.hear(msg.DrainStarted(9, 30.0))
  return learner


def test_a_learner_hands_over_what_is_settled_and_then_the_rest():
  learner = _draining(keeps_progress=True)
  effects = learner.scan()
  # Round 9 is of fragment 1, 10 of 2, 11 of 3, 12 of 0.
  assert [c.round for c in handed_over(effects)] == [10, 11]
  assert not messages(effects)
  learner.publish(0, 1)
  assert not any(isinstance(m, msg.Farewell) for m in messages(effects))
  effects = learner.refuse(1, Reason.LATE)
  (last,) = handed_over(effects)
  assert (last.round, last.steps) == (9, 4)
  (farewell,) = messages(effects)
  assert farewell == msg.Farewell(0, 1, 'drained', (9, 10, 11, 12))


def test_without_a_step_since_adoption_nothing_is_handed_over():
  learner = _draining()
  learner.scan()
  effects = learner.publish(0, 1)  # Overwritten: no step is left.
  assert not handed_over(effects)
  assert learner.state.ledgers[0].steps == 0


def test_what_was_dropped_in_the_drain_is_handed_over_again():
  learner = _draining(keeps_progress=True)
  learner.refuse(0, Reason.LATE)
  learner.refuse(1, Reason.LATE)
  assert len(handed_over(learner.scan())) == 4
  effects = learner.tell(ev.HandOverDropped(learner.now, 10))
  assert [c.round for c in handed_over(effects)] == [10]
  assert messages(effects) == [msg.Farewell(0, 1, 'drained', (9, 10, 11, 12))]
