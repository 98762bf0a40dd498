"""What a learner's threads hear of what its machine decides."""

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from tests.runtime.learner_stand_ins import (
  VALUE,
  WELCOME,
  NoArrays,
  ScriptedLink,
  make_machine,
)


def joined():
  """A machine that is compiled, has been welcomed, and has its fragment."""
  model, link = NoArrays(), ScriptedLink()
  machine = make_machine(model, link)
  machine.tell(ev.Compiled(0.0))
  for message in (WELCOME, VALUE):
    machine.tell(ev.MessageArrived(0.0, message))
  return machine, model, link


def test_messages_go_out_at_once_and_the_rest_waits_in_order():
  machine, model, link = joined()
  assert link.sent == [msg.Ready(learner=0, incarnation=1)]
  assert model.calls == [('claim', 0, 0)]
  first, second = machine.next_effect(), machine.next_effect()
  assert isinstance(first, fx.Adopt)
  assert second == fx.StartScan(0)
  assert machine.settled_state() is machine.state


def test_the_copy_lags_behind_until_it_has_adopted():
  machine, _, _ = joined()
  assert machine.state_of_copy() is None
  machine.has_adopted()
  assert machine.state_of_copy() is machine.state


def test_every_event_is_recorded_with_its_effects():
  recorded = []
  machine = make_machine(
    NoArrays(), ScriptedLink(), lambda *step: recorded.append(step)
  )
  event = ev.MessageArrived(0.0, msg.DrainStarted(0, seconds=5.0))
  machine.tell(event)
  assert recorded == [(event, (fx.WakeAt(10.0),))]


def test_an_alarm_rings_once():
  machine = make_machine(NoArrays(), ScriptedLink())
  assert not machine.take_alarm(100.0)
  # A learner gives the syncer up after twice its limit.
  machine.tell(ev.MessageArrived(0.0, msg.DrainStarted(0, seconds=5.0)))
  assert not machine.take_alarm(9.9)
  assert machine.take_alarm(10.0)
  assert not machine.take_alarm(10.0)


def test_a_welcome_is_an_answer():
  machine = make_machine(NoArrays(), ScriptedLink())
  machine.tell(ev.Compiled(0.0))
  assert not machine.is_answered.is_set()
  machine.tell(ev.MessageArrived(0.0, WELCOME))
  assert machine.is_answered.is_set() and not machine.is_over.is_set()


def test_a_rejection_is_an_answer_and_the_end():
  machine = make_machine(NoArrays(), ScriptedLink())
  machine.tell(ev.MessageArrived(0.0, msg.Rejection(0, 'another model')))
  assert machine.is_answered.is_set() and machine.is_over.is_set()
  assert machine.next_effect() == fx.Finish('another model', is_failure=True)


def test_what_fails_on_another_thread_is_raised_on_the_training_thread():
  machine = make_machine(NoArrays(), ScriptedLink())
  machine.notice('before')
  machine.fail(ValueError('another length'))
  assert machine.is_answered.is_set() and machine.is_over.is_set()
  assert machine.next_effect() == fx.Notice('before')
  with pytest.raises(ValueError, match='another length'):
    machine.next_effect()
