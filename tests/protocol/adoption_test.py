"""When a fragment is adopted before it is handed over."""

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol.messages import Reason
from tests.protocol.scripts import LearnerScript, handed_over


def _kinds(effects):
  return [type(e) for e in effects]


def test_with_one_fragment_progress_is_handed_over_in_every_scan():
  learner = LearnerScript(P=1, limit=4, keeps_progress=True)
  (first,) = handed_over(learner.scan())
  assert (first.round, first.steps, first.base_version) == (0, 1, 0)
  learner.publish(0, 1)
  effects = learner.scan()
  assert _kinds(effects) == [fx.Adopt, fx.HandOver, fx.StartScan]
  (second,) = handed_over(effects)
  # Two steps, one of them merged.
  assert (second.round, second.steps, second.base_version) == (1, 1, 1)
  # Nothing has come: both are in the next but one.
  assert not handed_over(learner.scan())
  learner.publish(1, 2, contributors=(1,))
  (third,) = handed_over(learner.scan())
  assert (third.round, third.steps, third.base_version) == (2, 3, 2)


def test_what_would_be_overwritten_is_not_adopted_before():
  learner = LearnerScript(P=1, limit=4)
  learner.scan()
  learner.publish(0, 1)
  assert _kinds(learner.scan()) == [fx.Adopt, fx.StartScan]


def test_a_hand_over_that_is_not_settled_stays_in_the_air():
  # Version 1 is of round 0, in which this learner is not; round 1 may merge it.
  learner = LearnerScript(P=1, limit=4, keeps_progress=True)
  learner.open(1)
  learner.scan()
  learner.publish(0, 1, contributors=(1,))
  effects = learner.scan()
  assert _kinds(effects) == [fx.Adopt, fx.StartScan]
  learner.publish(1, 2)
  (again,) = handed_over(learner.scan())
  # Three steps, the first merged.
  assert (again.round, again.steps, again.base_version) == (2, 2, 2)


def test_without_a_flight_the_hand_over_comes_first():
  learner = LearnerScript(P=1, limit=4, keeps_progress=True)
  learner.scan()
  learner.refuse(0, Reason.NOT_FINITE)
  learner.publish(0, 1, contributors=(1,))
  effects = learner.scan()
  assert _kinds(effects)[0] is fx.HandOver
