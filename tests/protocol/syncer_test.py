"""Admission, start, liveness and alarms of the syncer machine."""

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.syncer_state import BudgetOptions, Phase
from tests.protocol.cluster import Cluster, syncer_options
from tests.protocol.scripts import SyncerScript, messages

LIVELY = MembershipOptions(
  num_learners=3,
  heartbeat_seconds=1.0,
  liveness_timeout_seconds=10.0,
  start_timeout_seconds=60.0,
)


def _notices(effects):
  return [e.text for e in effects if isinstance(e, fx.Notice)]


def _opened(effects):
  return [m.round for m in messages(effects) if isinstance(m, msg.RoundOpened)]


def test_a_learner_is_welcomed_with_all_it_needs():
  syncer = SyncerScript(M=2, joined=1, P=2, H=2)
  effects = syncer.hello(1)
  welcome, fragments = effects[:2]
  assert welcome == fx.Send(
    1,
    msg.Welcome(
      1,
      2,
      'run',
      round=-1,
      last_round=-1,
      versions=(0, 0),
      merged_rounds=(-1, -1),
    ),
  )
  assert fragments == fx.SendFragments(1, (0, 1))


def test_a_returning_learner_is_sent_only_what_it_lacks():
  syncer = SyncerScript(M=2, joined=2, P=3, H=3)
  for m in (0, 1):
    syncer.contribute(m, 0)
  syncer.done(0)
  syncer.lose(1)
  effects = syncer.hello(1, run_id='run', incarnation=2, versions=(0, 0, 0))
  assert fx.SendFragments(1, (0,)) in effects
  syncer.lose(1)
  effects = syncer.hello(1, run_id='run', incarnation=3, versions=(1, 0, 0))
  assert not [e for e in effects if isinstance(e, fx.SendFragments)]


def test_another_process_takes_over_for_good():
  syncer = SyncerScript(M=2, joined=2)
  effects = syncer.hello(1)
  reason = 'learner 1 was started again elsewhere'
  assert effects[0] == fx.Disconnect(1, 2, reason, is_final=True)


def test_a_second_connection_takes_over():
  syncer = SyncerScript(M=2, joined=2)
  effects = syncer.hello(1, run_id='run', incarnation=2)
  assert effects[0] == fx.Disconnect(1, 2, 'superseded by a newer connection')
  assert syncer.incarnations[1] == 3
  # The old connection's end is not the new one's.
  syncer.tell(ev.ConnectionLost(1.0, 1, 2, 'closed'))
  assert syncer.state.members[1].is_connected


def test_two_processes_of_one_number_do_not_take_turns():
  syncer = SyncerScript(M=1, joined=1)
  syncer.join(0)  # Another process: incarnation 2.
  effects = syncer.hello(0, run_id='run', incarnation=1)
  (rejection,) = messages(effects)
  assert isinstance(rejection, msg.Rejection)
  assert 'is superseded' in rejection.reason
  assert syncer.state.members[0].incarnation == 2
  assert syncer.state.members[0].is_connected


def test_a_lost_welcome_does_not_bar_its_learner():
  syncer = SyncerScript(M=1, joined=1)
  syncer.lose(0)
  # The welcome of incarnation 2 never arrives: the learner still is 1.
  syncer.hello(0, run_id='run', incarnation=1)
  syncer.lose(0)
  effects = syncer.hello(0, run_id='run', incarnation=1)
  assert isinstance(messages(effects)[0], msg.Welcome)
  assert syncer.incarnations[0] == 3


@pytest.mark.parametrize(
  'hello',
  [
    {'layout': 'other'},
    {'run_id': 'other'},
    {'versions': (7,) * 6},
    {'protocol': 9},
  ],
)
def test_who_does_not_belong_is_rejected_and_changes_nothing(hello):
  syncer = SyncerScript(M=2, joined=1)
  before = syncer.state
  effects = syncer.hello(1, **hello)
  assert [type(m) for m in messages(effects)] == [msg.Rejection]
  assert syncer.state == before


def test_the_run_starts_when_everybody_is_ready():
  syncer = SyncerScript(M=3, joined=2, membership=LIVELY)
  assert syncer.state.phase is Phase.GATHERING
  syncer.hello(2)
  assert syncer.state.phase is Phase.GATHERING  # Connected, but not ready.
  effects = syncer.say(msg.Ready(2, syncer.incarnations[2]))
  assert _opened(effects) == [0]
  assert syncer.state.phase is Phase.RUNNING


def _beat(syncer, learners, seconds):
  """Time passes in which these learners are heard of."""
  effects = ()
  for _ in range(seconds):
    syncer.now += 1.0
    for m in learners:
      incarnation = syncer.incarnations[m]
      beat = msg.Heartbeat(m, incarnation, 'waiting', 0, 0, 0.0)
      effects += syncer.say(beat)
  return effects


def test_after_a_time_the_run_starts_without_those_who_are_missing():
  syncer = SyncerScript(M=3, k_min=2, joined=2, membership=LIVELY)
  assert not _opened(_beat(syncer, [0, 1], 59))
  effects = _beat(syncer, [0, 1], 1)
  assert _opened(effects) == [0]
  assert 'Starting with 2 of 3 learners' in _notices(effects)[0]


def test_with_fewer_than_k_min_the_run_does_not_start():
  syncer = SyncerScript(M=3, k_min=2, joined=1, membership=LIVELY)
  assert not _opened(_beat(syncer, [0], 70))
  assert _opened(syncer.join(1)) == [0]


def test_one_lost_heartbeat_evicts_nobody():
  syncer = SyncerScript(M=3, joined=3, membership=LIVELY)
  effects = _beat(syncer, [0, 1], 9)  # Learner 2 is silent for 9 s.
  assert not [e for e in effects if isinstance(e, fx.Disconnect)]
  assert 2 in syncer.state.connected


def test_silence_is_absence():
  syncer = SyncerScript(M=3, joined=3, membership=LIVELY)
  effects = _beat(syncer, [0, 1], 10)
  assert fx.Disconnect(2, 3, 'silent for 10.0 s') in effects
  assert syncer.state.connected == (0, 1)


@pytest.mark.parametrize('last_seen', [0.4, 0.6, 5.7])
def test_an_alarm_is_never_a_rounding_too_early(last_seen):
  options = MembershipOptions(
    num_learners=1, heartbeat_seconds=0.05, liveness_timeout_seconds=0.3
  )
  syncer = SyncerScript(M=1, membership=options)
  syncer.now = last_seen
  syncer.join(0)
  # (a + 0.3) - a < 0.3 in floating point, for these a: whoever compares that
  # with the timeout when the alarm comes finds nothing to do, and no other
  # alarm follows.
  assert (last_seen + 0.3) - last_seen < 0.3
  assert syncer.state.wake_at == last_seen + 0.3
  syncer.tell(ev.TimePassed(last_seen + 0.3))
  assert not syncer.state.connected


def test_nobody_is_said_to_train_on_where_nobody_is():
  syncer = SyncerScript(M=1, k_min=1, joined=1)
  (why,) = _notices(syncer.lose(0))
  assert why.startswith('Rounds wait: 0 of 1 required learners')
  assert 'others' not in why


def test_a_shortage_is_explained_once_for_every_change():
  syncer = SyncerScript(M=3, k_min=3, joined=3)
  assert not _notices(_beat(syncer, [0, 1, 2], 2))
  syncer.now = 9.1
  (why,) = _notices(syncer.lose(2))
  assert why == (
    'Rounds wait: 2 of 3 required learners; learner 2 last seen 7.1 s ago. '
    'The others train on.'
  )
  assert not _notices(_beat(syncer, [0, 1], 3))
  assert '1 of 3' in _notices(syncer.lose(1))[0]
  assert '2 of 3' in _notices(syncer.hello(1))[0]
  assert _notices(syncer.hello(2)) == [
    'Rounds go on: enough learners are connected.'
  ]


def test_alarms_are_asked_for_when_time_alone_decides():
  syncer = SyncerScript(M=3, membership=LIVELY)
  first = syncer.wait(0.0)
  assert first == (fx.WakeAt(60.0),)  # The start, whoever is there.
  effects = syncer.hello(0)
  assert effects[-1] == fx.WakeAt(10.0)  # Its silence would be noticed.
  # Heartbeats put that off; the alarm comes, finds nothing and is set anew.
  assert not [e for e in _beat(syncer, [0], 5) if isinstance(e, fx.WakeAt)]
  assert syncer.tell(ev.TimePassed(10.0)) == (fx.WakeAt(15.0),)


def test_silent_learners_are_noticed_on_the_cluster():
  # Learner 1's link dies without a word; its absence is visible within the
  # liveness timeout, and learner 0 is not held up: K_min=1.
  membership = MembershipOptions(
    num_learners=2, heartbeat_seconds=1.0, liveness_timeout_seconds=5.0
  )
  options = syncer_options(M=2, membership=membership, rounds=40)
  cluster = Cluster(
    options, [lambda: 1.0, lambda: 1.0], latency=0.05, heartbeats=True
  )
  cluster.at(10.0, lambda: cluster.partition(1, is_noticed=False))
  cluster.run(until=60.0)
  lost = [
    event.now
    for event, effects in cluster.tape
    for effect in effects
    if isinstance(effect, fx.Disconnect)
  ]
  assert len(lost) == 1
  assert 10.0 + 4.0 <= lost[0] <= 10.0 + 5.0 + 0.05
  assert cluster.end is not None
  # 40 rounds of one scan each; the quorum of round 39 needs a 41st scan, and
  # the start and the way to the syncer take a fraction.
  assert cluster.when(msg.DrainStarted) == pytest.approx(41.0, abs=1.0)


def test_what_is_no_event_of_a_syncer_is_an_error():
  with pytest.raises(ValueError, match='is no event of a syncer'):
    SyncerScript().tell(ev.Compiled(0.0))


@pytest.mark.parametrize(
  ('fields', 'rule'),
  [
    ({'rounds': -1, 'merged_tokens': 1}, 'must not be negative'),
    ({}, 'would never end'),
    ({'rounds': 1, 'drain_seconds': 0.0}, 'must be positive'),
  ],
)
def test_budgets_are_checked(fields, rule):
  with pytest.raises(ValueError, match=rule):
    BudgetOptions(**fields)


def test_a_quorum_of_more_than_all_is_refused():
  with pytest.raises(ValueError, match='no round could ever be merged'):
    syncer_options(M=2, k_min=3)
