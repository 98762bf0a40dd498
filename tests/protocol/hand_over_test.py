"""What becomes of a hand-over, and of the work that is in it."""

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.hand_over import MAX_RESENDS
from decoupled_diloco.protocol.messages import Reason
from tests.protocol.scripts import LearnerScript, handed_over, messages


def _flight(learner, fragment):
  return learner.state.ledgers[fragment].flight


def test_one_hand_over_a_scan():
  learner = LearnerScript(P=4, limit=8)
  for round_ in range(4):
    assert [c.round for c in handed_over(learner.scan())] == [round_]


def test_the_newest_open_round_is_entered():
  learner = LearnerScript(P=8, limit=8)
  learner.scan()
  learner.open(3)
  assert handed_over(learner.scan())[0].round == 3
  learner.open(3)
  assert handed_over(learner.scan())[0].round == 4


def test_a_fragment_is_not_handed_over_twice_from_one_base():
  # P=1: round 1 is of the same fragment as round 0, whose fate is not known.
  learner = LearnerScript(P=1, limit=4)
  assert len(handed_over(learner.scan())) == 1
  assert not handed_over(learner.scan())
  learner.publish(0, 1)
  assert not handed_over(learner.scan())  # Adopted at this boundary.
  (second,) = handed_over(learner.scan())
  assert (second.round, second.steps, second.base_version) == (1, 1, 1)


def test_what_was_damaged_is_sent_again_and_not_for_ever():
  learner = LearnerScript()
  (contribution,) = handed_over(learner.scan())
  for _ in range(MAX_RESENDS):
    assert learner.refuse(0, Reason.CORRUPT) == (fx.Resend(contribution),)
  effects = learner.refuse(0, Reason.CORRUPT)
  assert [type(e) for e in effects] == [fx.Notice, fx.Forget]
  assert _flight(learner, 0) is None


@pytest.mark.parametrize(
  'reason',
  [
    Reason.UNKNOWN_ROUND,
    Reason.WRONG_FRAGMENT,
    Reason.STALE,
    Reason.EMPTY,
    Reason.NOT_FINITE,
    Reason.NO_QUORUM,
    Reason.DRAINING,
  ],
)
def test_after_a_refusal_the_open_round_is_entered_again(reason):
  # K_min may be M: then nobody else can complete this round.
  learner = LearnerScript(P=4, limit=8)
  for _ in range(3):
    learner.scan()
  assert fx.Forget(1, 1) in learner.refuse(1, reason)
  (again,) = handed_over(learner.scan())
  assert (again.round, again.steps, again.base_version) == (1, 4, 0)
  assert handed_over(learner.scan())[0].round == 3


def test_a_round_that_is_over_is_not_entered_again():
  learner = LearnerScript(P=4, limit=8)
  learner.scan()
  learner.scan()
  assert fx.Forget(0, 0) in learner.refuse(0, Reason.LATE)
  assert handed_over(learner.scan())[0].round == 2
  learner.refuse(1, Reason.NOT_FINITE)
  learner.open(2)  # Round 1 has gone ahead without this learner.
  assert handed_over(learner.scan())[0].round == 3


@pytest.mark.parametrize('reason', [Reason.DUPLICATE, Reason.FENCED])
def test_a_refused_copy_says_nothing_of_the_original(reason):
  learner = LearnerScript(keeps_progress=True)
  learner.scan()
  assert learner.refuse(0, reason) == ()
  assert _flight(learner, 0) is not None
  learner.publish(0, 1)
  learner.scan()
  # Two steps, one of them merged: counted once.
  assert learner.state.ledgers[0].steps == 1


def test_refusals_of_something_else_are_ignored():
  learner = LearnerScript()
  learner.scan()
  assert learner.refuse(4, Reason.STALE) == ()  # The same fragment, later.
  old = msg.Refusal(0, 0, 0, 0, Reason.STALE, 'of a former life')
  assert learner.hear(old) == ()
  assert _flight(learner, 0) is not None
  learner.publish(0, 1)
  assert learner.refuse(0, Reason.LATE) == ()  # A copy; the round is merged.


def test_what_could_not_be_sent_is_handed_over_again():
  learner = LearnerScript(P=4, limit=8)
  for _ in range(3):
    learner.scan()
  effects = learner.tell(ev.HandOverDropped(learner.now, 0))
  assert effects == (fx.Forget(0, 0),)
  (again,) = handed_over(learner.scan())
  assert (again.round, again.steps) == (0, 4)
  assert learner.tell(ev.HandOverDropped(learner.now, 77)) == ()


def test_a_learner_that_waits_can_enter_a_missed_round():
  # Rounds 0 and 1 are handed over, at a limit of 1 it waits; round 0 is lost.
  learner = LearnerScript(P=4, limit=1, mode='wait')
  learner.scan()
  assert isinstance(learner.scan()[-1], fx.Wait)
  effects = learner.refuse(0, Reason.NOT_FINITE)
  assert isinstance(effects[-1], fx.StartScan)
  effects = learner.scan()
  assert handed_over(effects)[0].round == 0
  assert isinstance(effects[-1], fx.Wait)


def test_a_learner_does_not_wait_for_a_round_that_was_cancelled():
  learner = LearnerScript(P=1, limit=0, mode='wait')
  assert isinstance(learner.scan()[-1], fx.Wait)
  learner.open(1)
  # The others of round 0 had become too stale: no publication will come.
  effects = learner.refuse(0, Reason.NO_QUORUM)
  assert isinstance(effects[-1], fx.StartScan)
  (again,) = handed_over(learner.scan())
  assert (again.round, again.steps) == (1, 2)


def test_a_learner_waits_for_a_round_that_went_on_without_it():
  learner = LearnerScript(P=1, limit=0, mode='wait')
  learner.scan()
  learner.open(1)
  effects = learner.refuse(0, Reason.LATE)
  assert not [e for e in effects if isinstance(e, fx.StartScan)]
  assert isinstance(learner.publish(0, 1, (1,))[-1], fx.StartScan)


# Reconnections, with the flights in every state. The learner has handed over
# rounds 0 and 1 (fragments 0 and 1, after one and two steps) and taken a third.


def _cut_off(keeps_progress):
  learner = LearnerScript(P=4, limit=8, keeps_progress=keeps_progress)
  learner.scan()
  learner.scan()
  learner.lose()
  learner.scan()
  return learner


@pytest.mark.parametrize('keeps_progress', [False, True])
def test_never_received(keeps_progress):
  learner = _cut_off(keeps_progress)
  effects = learner.welcome(round=0, last_round=-1)
  assert effects == (
    fx.Forget(0, 0),
    fx.Forget(1, 1),
    fx.Send(0, msg.Ready(0, 2)),
  )
  (again,) = handed_over(learner.scan())
  assert (again.round, again.incarnation, again.steps) == (0, 2, 4)


@pytest.mark.parametrize('keeps_progress', [False, True])
def test_received_and_open(keeps_progress):
  learner = _cut_off(keeps_progress)
  effects = learner.welcome(round=0, last_round=0)
  assert fx.Forget(0, 0) not in effects
  assert fx.Forget(1, 1) in effects
  assert handed_over(learner.scan())[0].round == 1
  # Now round 0 is merged, and it knows which part of its four steps that was.
  learner.publish(0, 1)
  effects = learner.scan()
  assert fx.Adopt(0, 0, 1, 0) in effects
  assert learner.state.ledgers[0].steps == (4 if keeps_progress else 0)


@pytest.mark.parametrize('keeps_progress', [False, True])
def test_merged_while_away(keeps_progress):
  learner = _cut_off(keeps_progress)
  learner.welcome(round=2, last_round=1, versions=(1, 0, 0, 0))
  # What it lacks is sent as a value, with the round that it was merged in.
  learner.hear(msg.Publication(0, 0, 1, (), 'value', merged_round=0))
  effects = learner.scan()
  assert fx.Adopt(0, 0, 1, 0) in effects
  assert fx.Forget(0, 0) not in effects
  assert learner.state.ledgers[0].steps == (3 if keeps_progress else 0)
  assert _flight(learner, 1) is not None


@pytest.mark.parametrize('keeps_progress', [False, True])
def test_closed_without_it_while_away(keeps_progress):
  learner = _cut_off(keeps_progress)
  learner.welcome(round=5, last_round=-1, versions=(2, 1, 0, 0))
  learner.hear(msg.Publication(4, 0, 2, (), 'value'))
  learner.hear(msg.Publication(1, 1, 1, (), 'value'))
  effects = learner.scan()
  assert fx.Adopt(4, 0, 2, -1) in effects
  # The work is still there, or overwritten, but never counted as merged.
  assert learner.state.ledgers[0].steps == (4 if keeps_progress else 0)


def test_merged_and_staged_before_the_link_broke():
  learner = LearnerScript(P=4, limit=8, keeps_progress=True)
  learner.scan()
  learner.publish(0, 1)
  learner.lose()
  learner.welcome(round=1, last_round=0, versions=(1, 0, 0, 0))
  effects = learner.scan()
  assert fx.Adopt(0, 0, 1, 0) in effects
  assert learner.state.ledgers[0].steps == 1


def test_a_reconnected_learner_announces_itself_again():
  learner = LearnerScript()
  learner.lose()
  assert not messages(learner.scan())
  effects = learner.welcome(round=0, last_round=-1)
  assert messages(effects) == [msg.Ready(0, 2)]
