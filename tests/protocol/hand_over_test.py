"""What becomes of a hand-over, and of the work that is in it."""

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.hand_over import MAX_RESENDS
from decoupled_diloco.protocol.messages import Reason
from tests.protocol.scripts import LearnerScript, handed_over


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
