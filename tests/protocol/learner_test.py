"""What a learner does at its scan boundaries, and between them."""

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.learner_state import LeadOptions, Phase
from tests.protocol.scripts import LearnerScript, handed_over, messages


def _kinds(effects):
  return [type(e) for e in effects]


def _starts(effects):
  return [e.global_step for e in effects if isinstance(e, fx.StartScan)]


def test_what_comes_while_it_compiles_is_adopted_once():
  # Otherwise every version that is published meanwhile would be kept.
  learner = LearnerScript(P=1, has_begun=False)
  learner.welcome(round=3)
  for version in (3, 4, 5):
    publication = msg.Publication(version - 1, 0, version, (), 'value')
    assert fx.Adopt not in {type(e) for e in learner.hear(publication)}
  effects = learner.tell(ev.Compiled(1.0))
  assert effects[0] == fx.Adopt(4, 0, 5, -1)


def test_at_a_boundary_it_hands_over_then_adopts_then_trains():
  # The delta of the next round's fragment must hold the whole scan, even where
  # a newer version of that very fragment is about to be adopted.
  learner = LearnerScript(P=2)
  learner.open(2)
  learner.publish(0, 1, contributors=(1,))
  effects = learner.scan()
  assert _kinds(effects) == [fx.HandOver, fx.Adopt, fx.StartScan]
  (contribution,) = handed_over(effects)
  assert (contribution.round, contribution.fragment) == (2, 0)
  assert (contribution.base_version, contribution.steps) == (0, 1)
  assert effects[1] == fx.Adopt(0, 0, 1, -1)


def test_in_a_scan_it_only_confirms_what_comes():
  learner = LearnerScript()
  learner.scan()
  assert learner.publish(0, 1) == (fx.Send(0, msg.Receipt(0, 1, 0)),)
  assert learner.state.ledgers[0].base_version == 0


def test_receipts_are_at_most_ten_a_second():
  """At 1.0; at 1.125, not before 1.1; at 1.25, not before 1.225."""
  learner = LearnerScript(P=4)
  learner.scan()
  confirmed = []
  for round_, now in enumerate((1.0, 1.05, 1.125, 1.2, 1.25)):
    learner.now = now
    version = 1 + round_ // 4
    if learner.publish(round_, version, contributors=()):
      confirmed.append(now)
  assert confirmed == [1.0, 1.125, 1.25]


def test_only_the_newest_version_is_adopted():
  learner = LearnerScript()
  learner.publish(0, 1, contributors=())
  learner.publish(4, 2, contributors=())
  learner.publish(0, 1, contributors=())  # A copy, late.
  adopted = [e for e in learner.scan() if isinstance(e, fx.Adopt)]
  assert adopted == [fx.Adopt(4, 0, 2, -1)]


def _after_adoption(keeps_progress, contributors):
  """Hands fragment 0 over after 1 step, adopts after 3, hands over again."""
  learner = LearnerScript(P=2, keeps_progress=keeps_progress, limit=4)
  (first,) = handed_over(learner.scan())
  assert (first.round, first.steps, first.tokens) == (0, 1, 100)
  learner.scan()
  learner.publish(0, 1, contributors)
  effects = learner.scan()
  # Round 2 is of fragment 0 again. What is left by the adoption can be handed
  # over at once; where nothing is, after another scan.
  later = () if keeps_progress else learner.scan()
  (again,) = handed_over((*effects, *later))
  assert (again.round, again.fragment, again.base_version) == (2, 0, 1)
  return effects, again


@pytest.mark.parametrize(
  ('keeps_progress', 'contributors', 'steps'),
  [
    (False, (0, 1), 1),  # Overwritten: only the step after the adoption.
    (False, (1,), 1),
    (True, (0, 1), 2),  # Rebased: all three steps but the one that was merged.
    (True, (1,), 3),  # Rebased, and nothing of it was merged.
  ],
)
def test_counters_hold_what_no_merge_has_seen(
  keeps_progress, contributors, steps
):
  effects, again = _after_adoption(keeps_progress, contributors)
  assert (again.steps, again.tokens) == (steps, 100 * steps)
  total = 3 if keeps_progress else 4
  assert (again.total_steps, again.total_tokens) == (total, 100 * total)
  adopt = next(e for e in effects if isinstance(e, fx.Adopt))
  is_merged = 0 in contributors
  assert adopt.merged_round == (0 if is_merged else -1)
  assert (fx.Forget(0, 0) in effects) is not is_merged


@pytest.mark.parametrize('keeps_progress', [False, True])
def test_a_version_of_an_earlier_round_leaves_a_flight_in_the_air(
  keeps_progress,
):
  # Round 2 is handed over before round 0's version, without this learner in it,
  # is adopted: that version says nothing of round 2.
  learner = LearnerScript(P=2, keeps_progress=keeps_progress, limit=4)
  learner.open(2)
  learner.publish(0, 1, contributors=(1,))
  (flown,) = handed_over(learner.scan())
  assert (flown.round, flown.steps, flown.base_version) == (2, 1, 0)
  flight = learner.state.ledgers[0].flight
  assert flight is not None
  assert flight.round == 2
  learner.scan()
  learner.publish(2, 2)
  effects = learner.scan()
  assert fx.Adopt(2, 0, 2, 2) in effects
  # Three steps, of which the merge has seen one.
  assert learner.state.ledgers[0].steps == (2 if keeps_progress else 0)


def test_training_goes_by_the_steps_of_the_run():
  learner = LearnerScript(P=12, K=6, limit=12)
  assert _starts(learner.scan()) == [6]
  assert _starts(learner.scan()) == [12]
  learner.open(9)  # Others were faster.
  assert _starts(learner.scan()) == [60]  # It is in round 9, works for 10.


def test_at_the_lead_limit_it_trains_on():
  learner = LearnerScript(P=4, limit=2)
  assert [handed_over(learner.scan())[0].round for _ in range(2)] == [0, 1]
  for _ in range(3):
    effects = learner.scan()
    assert _kinds(effects) == [fx.StartScan]
  learner.publish(0, 1)
  # The version it adopts at this boundary counts: 2 - 0 = 2.
  (next_,) = handed_over(learner.scan())
  assert (next_.round, next_.steps) == (2, 6)


def test_a_slow_learner_is_never_at_its_limit():
  # Ten rounds go by in each of its scans.
  learner = LearnerScript(P=4, limit=2)
  learner.open(10)
  learner.publish(9, 3, contributors=(1,))
  assert handed_over(learner.scan())[0].round == 10


def test_with_wait_it_stands_still_at_the_limit():
  learner = LearnerScript(P=4, limit=0, mode='wait')
  effects = learner.scan()
  assert handed_over(effects)[0].is_waiting
  assert effects[-1] == fx.Wait('for the publication of round 0')
  assert learner.state.phase is Phase.WAITING
  effects = learner.publish(0, 1)
  assert _kinds(effects) == [fx.Send, fx.Adopt, fx.StartScan]


def test_with_wait_it_may_lead_by_the_limit():
  learner = LearnerScript(P=4, limit=1, mode='wait')
  effects = learner.scan()
  assert not handed_over(effects)[0].is_waiting
  assert _starts(effects) == [1]
  effects = learner.scan()
  # It waits for round 0, and comes back after round 1 without its publication.
  assert not handed_over(effects)[0].is_waiting
  assert isinstance(effects[-1], fx.Wait)
  assert _starts(learner.publish(0, 1)) == [2]


def test_a_rejected_learner_fails_and_says_nothing_more():
  learner = LearnerScript(has_begun=False)
  effects = learner.hear(msg.Rejection(0, 'superseded'))
  assert effects == (fx.Finish('superseded', is_failure=True),)
  assert learner.welcome(round=0) == ()
  assert learner.tell(ev.Compiled(1.0)) == ()


def test_it_ends_with_the_run():
  learner = LearnerScript()
  effects = learner.hear(msg.RunEnded('10 rounds'))
  assert effects == (fx.Finish('10 rounds'),)
  assert learner.scan() == ()


def test_asked_to_stop_it_says_farewell():
  learner = LearnerScript()
  learner.scan()
  effects = learner.tell(ev.StopRequested(2.0, 'SIGTERM'))
  assert effects == (
    # Its hand-over of round 0 is on its way still.
    fx.Send(0, msg.Farewell(0, 1, 'SIGTERM', (0,))),
    fx.Finish('SIGTERM'),
  )


def test_a_run_that_does_not_end_is_left():
  learner = LearnerScript()
  effects = learner.hear(msg.DrainStarted(4, 30.0))
  assert effects == (fx.WakeAt(60.0),)
  assert learner.tell(ev.TimePassed(59.0)) == ()
  (finish,) = learner.tell(ev.TimePassed(60.0))
  assert isinstance(finish, fx.Finish)
  assert 'did not end the run in time' in finish.reason


def test_what_is_no_event_of_a_learner_is_an_error():
  learner = LearnerScript()
  with pytest.raises(ValueError, match='is no event of a learner'):
    learner.tell(ev.MergeDone(0.0, 0, 8, 1.0))
  with pytest.raises(ValueError, match='Ready is no message of a syncer'):
    learner.hear(msg.Ready(0, 1))


def test_without_a_connection_it_trains_and_hands_nothing_over():
  learner = LearnerScript()
  learner.lose()
  for _ in range(3):
    effects = learner.scan()
    assert _kinds(effects) == [fx.StartScan]
    assert not messages(effects)


@pytest.mark.parametrize(
  ('fields', 'rule'),
  [
    ({'on_lead_limit': 'stop'}, "must be 'train' or 'wait'"),
    ({'max_rounds_in_flight': 0}, 'would never hand anything over'),
    ({'max_rounds_in_flight': -1, 'on_lead_limit': 'wait'}, 'at least 0'),
  ],
)
def test_lead_options_are_checked(fields, rule):
  with pytest.raises(ValueError, match=rule):
    LeadOptions(**fields)
