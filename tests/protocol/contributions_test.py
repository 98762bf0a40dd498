"""What is accepted and what is refused, with which reason, one by one."""

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.messages import Reason
from decoupled_diloco.protocol.weights import StalenessOptions
from tests.protocol.scripts import SyncerScript, messages, reasons


def _syncer(**overrides):
  """Rounds 0 and 1 are merged, round 2 is in its grace, round 3 is current."""
  syncer = SyncerScript(
    M=3,
    joined=3,
    rounds=20,
    **{'staleness': StalenessOptions(max_staleness=0)} | overrides,
  )
  for round_ in (0, 1):
    for m in range(3):
      syncer.contribute(m, round_)
    syncer.done(round_)
  syncer.contribute(0, 2)
  syncer.contribute(0, 3)
  assert syncer.state.current == 3
  return syncer


def _kept(effects):
  return [e for e in effects if isinstance(e, fx.Accept | fx.Merge)]


@pytest.mark.parametrize(
  ('learner', 'round_', 'fields', 'reason'),
  [
    (1, 0, {}, Reason.DUPLICATE),  # Its part in round 0 is merged already.
    (0, 2, {}, Reason.DUPLICATE),
    (0, 3, {}, Reason.DUPLICATE),
    (1, 3, {'incarnation': 77}, Reason.FENCED),
    (1, 3, {'incarnation': 0}, Reason.FENCED),
    (7, 3, {}, Reason.FENCED),
    # The limit is 4: nobody has reason to be further ahead than 3 + 4 + 1.
    (1, 9, {}, Reason.UNKNOWN_ROUND),
    (1, 10**12, {}, Reason.UNKNOWN_ROUND),
    (1, -1, {}, Reason.UNKNOWN_ROUND),
    (1, 3, {'fragment': 4}, Reason.WRONG_FRAGMENT),
    (1, 3, {'fragment': -3}, Reason.WRONG_FRAGMENT),
    (1, 3, {'fragment': 99, 'base_version': 0}, Reason.WRONG_FRAGMENT),
    (1, 6, {'base_version': 0}, Reason.STALE),  # Fragment 0 is at version 1.
    (1, 3, {'base_version': 1}, Reason.STALE),  # From the future.
    (1, 3, {'base_version': -1}, Reason.STALE),
    (1, 3, {'steps': 0}, Reason.EMPTY),
    (1, 3, {'tokens': 0}, Reason.EMPTY),
    (1, 3, {'steps': -1}, Reason.EMPTY),
    (1, 3, {'payload': None}, Reason.CORRUPT),
    (1, 3, {'payload': ev.PayloadFacts(8, is_intact=False)}, Reason.CORRUPT),
    (1, 3, {'payload': ev.PayloadFacts(8, norm=None)}, Reason.NOT_FINITE),
    (
      1,
      3,
      {'payload': ev.PayloadFacts(8, norm=None, fits_layout=False)},
      Reason.WRONG_LAYOUT,
    ),
    (
      1,
      3,
      # What was damaged may have lost its length on the way.
      {'payload': ev.PayloadFacts(8, is_intact=False, fits_layout=False)},
      Reason.CORRUPT,
    ),
  ],
)
def test_refused_with_its_reason(learner, round_, fields, reason):
  syncer = _syncer()
  before = syncer.state.rounds
  effects = syncer.contribute(learner, round_, **fields)
  (refusal,) = messages(effects)
  assert isinstance(refusal, msg.Refusal)
  assert (refusal.learner, refusal.round) == (learner, round_)
  assert refusal.reason is reason
  assert refusal.detail
  assert not _kept(effects)
  assert syncer.state.rounds == before


@pytest.mark.parametrize('round_', [2, 3, 4, 8])
def test_accepted_from_the_grace_to_the_lead(round_):
  effects = _syncer().contribute(1, round_)
  assert not reasons(effects)
  assert fx.Accept(1, round_) in effects


def test_late_is_what_comes_for_a_round_that_is_over():
  syncer = SyncerScript(M=3, joined=3)
  syncer.contribute(0, 0)
  syncer.contribute(1, 0)
  syncer.contribute(0, 1)
  syncer.wait(60.0)  # The cap: its grace is over.
  assert syncer.state.rounds[0].stage == 'merging'
  assert reasons(syncer.contribute(2, 0)) == [Reason.LATE]
  assert reasons(syncer.contribute(1, 0)) == [Reason.DUPLICATE]
  syncer.done(0)
  assert 0 not in syncer.state.rounds
  assert reasons(syncer.contribute(2, 0)) == [Reason.LATE]


def test_nothing_is_accepted_before_the_run_starts():
  syncer = SyncerScript(M=3, joined=2)
  assert reasons(syncer.contribute(0, 0)) == [Reason.UNKNOWN_ROUND]
  assert reasons(syncer.contribute(0, -1)) == [Reason.UNKNOWN_ROUND]


def test_nobody_speaks_for_a_learner_that_is_away():
  syncer = _syncer()
  old = syncer.contribution(1, 3)
  syncer.lose(1)
  assert reasons(syncer.say(old, ev.PayloadFacts(8))) == [Reason.FENCED]
  syncer.join(1)
  assert reasons(syncer.say(old, ev.PayloadFacts(8))) == [Reason.FENCED]
  assert not reasons(syncer.contribute(1, 3))


def test_a_fenced_message_is_no_sign_of_life():
  syncer = _syncer()
  before = syncer.state.members[1]
  old = before.incarnation - 1
  syncer.now = 1.0  # The grace of round 2 has 0.8 s left.
  beat = msg.Heartbeat(1, old, 'training', 999, 999, 1.0)
  for message in (
    beat,
    msg.Receipt(1, old, 0),
    msg.Farewell(1, old, 'gone'),
    msg.Ready(1, old),
  ):
    assert syncer.say(message) == ()
  assert syncer.state.members[1] == before


def test_a_stranger_is_not_noticed():
  syncer = _syncer()
  before = syncer.state
  assert syncer.say(msg.Heartbeat(9, 1, 'training', 1, 1, 1.0)) == ()
  assert syncer.say(msg.Lacking(9, 1, (0,))) == ()
  assert syncer.state == before


def test_a_refused_contribution_is_a_sign_of_life_all_the_same():
  syncer = _syncer()
  syncer.now = 5.0
  syncer.contribute(1, 3, payload=None, total_steps=12, total_tokens=1200)
  member = syncer.state.members[1]
  assert member.last_seen == 5.0
  assert (member.total_steps, member.total_tokens) == (12, 1200)
  assert member.last_round == 1


def test_a_learner_that_lacks_fragments_is_sent_them():
  syncer = _syncer()
  incarnation = syncer.incarnations[1]
  effects = syncer.say(msg.Lacking(1, incarnation, (2, 99, -1)))
  assert effects == (fx.SendFragments(1, (2,)),)
  assert syncer.say(msg.Lacking(1, incarnation - 1, (2,))) == ()


def test_what_only_a_syncer_says_is_an_error():
  with pytest.raises(ValueError, match='RoundOpened is no message of a lear'):
    _syncer().say(msg.RoundOpened(1, 1))


def test_a_gap_is_reopened_when_its_learner_comes_back():
  # K_min=2 of 2: round 0 cannot go on without learner 1, whose hand-over was
  # refused and who, its link being cut, was never told.
  syncer = SyncerScript(M=2, k_min=2, joined=2)
  syncer.contribute(0, 0)
  bad = ev.PayloadFacts(8, is_intact=False)
  assert reasons(syncer.contribute(1, 0, payload=bad)) == [Reason.CORRUPT]
  syncer.contribute(1, 1)
  syncer.contribute(1, 2)
  syncer.lose(1)
  effects = syncer.hello(1, run_id='run', incarnation=2, versions=(0,) * 6)
  (welcome,) = messages(effects)
  assert isinstance(welcome, msg.Welcome)
  # It begins again at round 0, and nothing of it is held for later rounds.
  assert welcome.last_round == -1
  assert {fx.Discard(1, 1), fx.Discard(1, 2)} < set(effects)
  syncer.say(msg.Ready(1, syncer.incarnations[1]))
  assert [type(e) for e in syncer.contribute(1, 0)].count(fx.Merge) == 1


def test_without_a_gap_everything_is_kept_for_a_learner_that_comes_back():
  syncer = SyncerScript(M=2, k_min=2, joined=2)
  syncer.contribute(1, 0)
  syncer.contribute(1, 1)
  syncer.lose(1)
  effects = syncer.hello(1)
  (welcome,) = messages(effects)
  assert isinstance(welcome, msg.Welcome)
  assert welcome.last_round == 1
  assert not [e for e in effects if isinstance(e, fx.Discard)]
