"""What a learner makes of a welcome, and what it tells the syncer then."""

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from tests.protocol.scripts import LearnerScript, handed_over, messages


def _flight(learner, fragment):
  return learner.state.ledgers[fragment].flight


def test_a_learner_is_ready_once_it_has_compiled_and_holds_everything():
  learner = LearnerScript(P=2, has_begun=False)
  assert learner.welcome(round=-1) == ()
  assert learner.hear(msg.Publication(-1, 0, 0, (), 'value')) == ()
  effects = learner.tell(ev.Compiled(1.0))
  assert effects == (fx.Adopt(-1, 0, 0, -1),)
  effects = learner.hear(msg.Publication(-1, 1, 0, (), 'value'))
  assert effects == (
    fx.Adopt(-1, 1, 0, -1),
    fx.Send(0, msg.Ready(0, 1)),
    fx.Wait('for the run to start'),
  )
  assert learner.open(0) == (fx.StartScan(0),)


def test_a_learner_that_comes_new_continues_where_the_run_is():
  # The schedule of the learning rate neither starts again nor runs ahead.
  learner = LearnerScript(P=2, K=6, has_begun=False)
  learner.tell(ev.Compiled(0.0))
  learner.welcome(
    round=7, last_round=5, versions=(3, 3), total_steps=30, total_tokens=3000
  )
  learner.hear(msg.Publication(6, 0, 3, (), 'value'))
  effects = learner.hear(msg.Publication(5, 1, 3, (), 'value'))
  assert effects[-1] == fx.StartScan(42)
  (first,) = handed_over(learner.scan())
  assert (first.round, first.base_version, first.steps) == (7, 3, 6)
  # Its totals go on from those of its former lives.
  assert (first.total_steps, first.total_tokens) == (36, 3600)


def test_a_round_of_a_former_life_is_not_entered_again():
  learner = LearnerScript(P=4, limit=8, has_begun=False)
  learner.tell(ev.Compiled(0.0))
  learner.welcome(round=7, last_round=8)
  for p in range(4):
    learner.hear(msg.Publication(6, p, 1, (), 'value'))
  assert handed_over(learner.scan())[0].round == 9


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


def test_a_snapshot_gives_back_the_copy_its_books_and_its_position():
  former = LearnerScript(P=2, K=3)
  former.scan()
  former.scan()
  assert former.state.ledgers[0].flight is not None
  learner = LearnerScript(P=2, K=3, has_begun=False)
  learner.tell(ev.Resumed(0.0, former.state))
  # What became of its hand-overs, the welcome tells.
  assert learner.state.ledgers == tuple(
    ledger._replace(flight=None) for ledger in former.state.ledgers
  )
  for name in ('run_id', 'total_steps', 'total_tokens', 'merged_tokens'):
    assert getattr(learner.state, name) == getattr(former.state, name)
  # It is nobody yet, and nowhere.
  assert learner.state.incarnation == 0
  assert (learner.state.newest_round, learner.state.last_round) == (-1, -1)


def test_what_a_former_life_handed_over_since_its_snapshot_is_not_kept():
  """Fragment 0 was merged once more, of 1 a hand-over is held; not so 2."""
  former = LearnerScript(P=3)
  former.scan()
  learner = LearnerScript(P=3, has_begun=False)
  learner.tell(ev.Resumed(0.0, former.state))
  learner.welcome(
    round=4, last_round=4, merged_rounds=(3, -1, -1), held_rounds=(4,)
  )
  assert [ledger.is_void for ledger in learner.state.ledgers] == [
    True,
    True,
    False,
  ]
  assert [ledger.steps for ledger in learner.state.ledgers] == [0, 0, 1]


def test_a_snapshot_of_another_number_of_fragments():
  learner = LearnerScript(P=4, has_begun=False)
  with pytest.raises(ValueError, match=r'has 2 fragments, and num_fragments=4'):
    learner.tell(ev.Resumed(0.0, LearnerScript(P=2).state))
