import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import grace
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.grace import GraceOptions, GraceState
from tests.protocol.cluster import Cluster, syncer_options
from tests.protocol.scripts import SyncerScript, reasons

OPTIONS = GraceOptions(
  gamma=0.9, overlap_scans=2.0, cap_seconds=60.0, decay=0.8
)
STATE = GraceState(step_seconds={0: 0.5, 1: 0.75, 2: 0.1}, sync_seconds=0.5)


def _window(options=OPTIONS, state=STATE, quorum_seconds=1.0, learners=(0, 1)):
  return grace.window(
    options,
    state,
    steps_per_scan=4,
    quorum_seconds=quorum_seconds,
    learners=learners,
  )


def test_window_is_a_share_of_the_free_time():
  # The fastest connected learner is 0: overlap 2 scans x 4 steps x 0.5 s = 4 s.
  # 0.9 x (4 - 1 - 0.5) = 2.25.
  assert _window().seconds == pytest.approx(2.25)
  assert _window().reason == (
    '0.9 x (overlap 4 s - quorum 1 s - sync 0.5 s), cap 60 s'
  )


def test_the_fastest_of_the_connected_learners_counts():
  # Without learner 0: 2 x 4 x 0.75 = 6 s; 0.9 x (6 - 1 - 0.5) = 4.05.
  assert _window(learners=(1,)).seconds == pytest.approx(4.05)
  # With learner 2: 2 x 4 x 0.1 = 0.8 s, less than quorum and sync: none.
  assert _window(learners=(0, 1, 2)).seconds == 0.0


def test_window_is_clipped():
  options = GraceOptions(gamma=0.9, overlap_scans=2.0, cap_seconds=2.0)
  assert _window(options).seconds == 2.0
  assert _window(quorum_seconds=3.6).seconds == 0.0
  assert _window(GraceOptions(gamma=0.0)).seconds == 0.0


@pytest.mark.parametrize(
  ('state', 'learners'),
  [
    (grace.init(), (0,)),
    (GraceState({}, 1.0), (0,)),
    (GraceState({1: 1.0}, 1.0), (0,)),
  ],
)
def test_without_an_estimate_it_is_the_cap(state, learners):
  assert _window(state=state, learners=learners) == (
    60.0,
    'no estimate yet: the cap',
  )


def test_before_the_first_publication_sync_counts_as_nothing():
  # 0.9 x (2 x 4 x 0.5 - 1) = 2.7.
  seconds, reason = _window(state=GraceState({0: 0.5}, None))
  assert seconds == pytest.approx(2.7)
  assert reason == ('0.9 x (overlap 4 s - quorum 1 s - sync unknown), cap 60 s')


@pytest.mark.parametrize('scan_seconds', [0.01, 1.0])
def test_the_first_rounds_are_not_slower_than_the_others(scan_seconds):
  # One learner is four times slower: the grace before the first estimate of the
  # network's time decides how long round 0 may wait for it.
  options = syncer_options(M=2, H=12, P=12, rounds=40)
  cluster = Cluster(
    options,
    [lambda: scan_seconds, lambda: 4 * scan_seconds],
    latency=0.05 * scan_seconds,
  ).run()
  merged = {
    merge.round: event.now
    for event, effects in cluster.tape
    for merge in effects
    if isinstance(merge, fx.Merge)
  }
  # In scans: they begin after four latencies (hello, welcome, ready, round
  # opened), round 0 has its quorum when learner 0 has come back after two and
  # another latency, and then a grace of 0.9 x 2.
  assert merged[0] / scan_seconds == pytest.approx(0.25 + 2.0 + 1.8)
  # All others follow one scan after another, earlier if both are in.
  assert 32.0 < merged[30] / scan_seconds <= 0.25 + 32.0 + 1.8


def test_moving_averages():
  state = grace.observe_step(OPTIONS, grace.init(), 3, 1.0)
  assert state.step_seconds == {3: 1.0}  # The first value as it is.
  state = grace.observe_step(OPTIONS, state, 3, 2.0)
  state = grace.observe_step(OPTIONS, state, 1, 7.0)
  # 0.8 x 1 + 0.2 x 2 = 1.2.
  assert state.step_seconds == {3: pytest.approx(1.2), 1: 7.0}
  state = grace.observe_sync(OPTIONS, state, 1.0)
  assert state.sync_seconds == 1.0
  state = grace.observe_sync(OPTIONS, state, 0.0)
  assert state.sync_seconds == pytest.approx(0.8)
  forgetful = GraceOptions(decay=0.0)
  assert grace.observe_sync(forgetful, state, 3.0).sync_seconds == 3.0


@pytest.mark.parametrize(
  ('field', 'value', 'rule'),
  [
    ('gamma', 1.1, r'must be in \[0, 1\]'),
    ('overlap_scans', -1.0, 'must not be negative'),
    ('cap_seconds', -1.0, 'must not be negative'),
    ('decay', 1.0, r'must be in \[0, 1\)'),
  ],
)
def test_options_are_checked(field, value, rule):
  with pytest.raises(ValueError, match=rule):
    GraceOptions(**{field: value})


def _began(effects):
  return [e for e in effects if isinstance(e, fx.GraceBegan)]


def test_a_round_stays_open_for_its_grace():
  syncer = SyncerScript(M=3, joined=3, grace=GraceOptions(cap_seconds=5.0))
  # Its steps take 10 s: 0.9 x 2 x 10 s is more than the cap.
  syncer.contribute(0, 0, step_seconds=10.0)
  syncer.now = 1.0
  (began,) = _began(syncer.contribute(0, 1, step_seconds=10.0))
  assert (began.round, began.grace_seconds) == (0, 5.0)
  assert began.quorum_seconds == 0.0  # K_min=1: the first made the quorum.
  syncer.now = 5.9
  assert not reasons(syncer.contribute(1, 0))
  syncer.now = 6.0
  (merge,) = [e for e in syncer.wait(0.0) if isinstance(e, fx.Merge)]
  assert [share.learner for share in merge.shares] == [0, 1]
  assert reasons(syncer.contribute(2, 0)) == [msg.Reason.LATE]


def test_grace_ends_when_nobody_is_left_to_wait_for():
  syncer = SyncerScript(M=3, joined=3)
  syncer.contribute(0, 0)
  syncer.contribute(1, 0)
  syncer.contribute(0, 1)
  effects = syncer.contribute(2, 0)
  assert [e.round for e in effects if isinstance(e, fx.Merge)] == [0]


def test_everybody_in_needs_no_grace():
  syncer = SyncerScript(M=2, joined=2)
  syncer.contribute(0, 0)
  effects = syncer.contribute(1, 0)
  (began,) = _began(effects)
  assert began.grace_seconds == 0.0
  assert began.reason == 'all 2 connected learners are in'
  assert [e.round for e in effects if isinstance(e, fx.Merge)] == [0]


def test_sync_is_measured_from_a_rounds_end_to_its_receipts():
  syncer = SyncerScript(M=1, joined=1)
  syncer.contribute(0, 0)
  syncer.now = 0.5
  syncer.done(0)
  syncer.now = 2.0
  syncer.say(msg.Receipt(0, syncer.incarnations[0], 0))
  assert syncer.state.grace.sync_seconds == 2.0
  # Receipts of rounds that nobody knows count for nothing.
  syncer.say(msg.Receipt(0, syncer.incarnations[0], 77))
  assert syncer.state.grace.sync_seconds == 2.0


def test_an_absence_is_not_taken_for_a_slow_network():
  syncer = SyncerScript(M=2, joined=2)
  syncer.contribute(0, 0)
  syncer.contribute(1, 0)
  syncer.lose(1)
  syncer.done(0)
  syncer.now = 0.5
  syncer.say(msg.Receipt(0, syncer.incarnations[0], 0))
  syncer.now = 100.0
  syncer.join(1)
  syncer.say(msg.Receipt(1, syncer.incarnations[1], 0))
  assert syncer.state.grace.sync_seconds == 0.5
