"""The pace where learners cannot come back before a publication.

They wait for it, or their only fragment is in flight (P = 1).
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.grace import GraceOptions
from tests.protocol.cluster import Cluster, syncer_options
from tests.protocol.scripts import SyncerScript

SPEEDS = (1.0, 1.1, 1.3, 4.0)
NO_GRACE = GraceOptions(gamma=0.0)


def _cluster(
  k_min,
  *,
  speeds=SPEEDS,
  P=1,
  mode='train',
  limit=4,
  grace=NO_GRACE,
  **settings_,
):
  """Scans take exactly `speeds` seconds; 60 rounds."""
  options = syncer_options(
    M=len(speeds),
    k_min=k_min,
    H=P,
    P=P,
    rounds=60,
    grace=grace,
    max_rounds_in_flight=limit,
  )
  scans = [lambda seconds=seconds: seconds for seconds in speeds]
  return Cluster(options, scans, on_lead_limit=mode, **settings_)


def _run(k_min, **settings_):
  return _cluster(k_min, **settings_).run()


def _period(cluster):
  """Seconds per round, over the last three quarters of the ordinary ones."""
  opened = [
    (event.now, effect.message.round)
    for event, effects in cluster.tape
    for effect in effects
    if isinstance(effect, fx.Broadcast)
    and isinstance(effect.message, msg.RoundOpened)
  ]
  (began, first), (ended, last) = opened[len(opened) // 4], opened[-1]
  return (ended - began) / (last - first)


@pytest.mark.parametrize('P', [1, 4])
@pytest.mark.parametrize('latency', [0.0, 0.05, 0.4])
@pytest.mark.parametrize('k_min', [1, 2, 3, 4])
def test_where_learners_wait_the_k_min_th_fastest_sets_the_pace(
  k_min, latency, P
):
  # Who is merged starts at the publication: one round takes the scan of the
  # K_min-th fastest, the way up, the merge and the way down; it is shorter if
  # others, who have not waited for this publication, are in meanwhile. (Without
  # the delay of `rounds.return_times`, whoever comes by ends a round: it was
  # two rounds per scan with K_min=1.)
  cluster = _run(
    k_min, mode='wait', limit=0, P=P, latency=latency, merge_seconds=0.1
  )
  scan = SPEEDS[k_min - 1]
  assert scan - 0.01 <= _period(cluster) <= scan + 2 * latency + 0.11


@settings(max_examples=20)
@given(
  st.lists(st.floats(1.0, 4.0), min_size=1, max_size=6),
  st.data(),
  st.sampled_from([0.0, 0.3]),
)
def test_whoever_waits_is_never_left_waiting(speeds, data, latency):
  k_min = data.draw(st.integers(1, len(speeds)))
  cluster = _run(k_min, speeds=speeds, mode='wait', limit=0, latency=latency)
  assert cluster.end is not None
  scan = sorted(speeds)[k_min - 1]
  assert scan - 0.05 <= _period(cluster) <= scan + 2 * latency + 0.05
  # And every payload that was accepted was merged.
  cluster.merged_tokens()


def test_where_learners_wait_the_grace_takes_in_those_who_come_soon():
  # Overlap 0.3 scans: until 0.27 s after the first, so 1.1 s is in and 1.3 not.
  cluster = _run(
    1,
    mode='wait',
    limit=0,
    speeds=(1.0, 1.1, 1.3, 1e4),
    grace=GraceOptions(gamma=0.9, overlap_scans=0.3),
  )
  assert cluster.participation(0, before=50) == 1.0
  assert cluster.participation(1, before=50) == 1.0
  # The third comes at 1.3 and is in the next round, so in every other one.
  assert cluster.participation(2, before=50) == pytest.approx(0.5, abs=0.05)
  assert _period(cluster) == pytest.approx(1.27, abs=0.02)


def test_a_waiting_learner_that_dies_holds_nobody_up_for_longer_than_a_scan():
  cluster = _cluster(2, mode='wait', limit=0)
  cluster.at(10.5, lambda: cluster.kill(0))
  cluster.run()
  assert cluster.end is not None
  # Learners 0 and 1 were the quorum; then it is learners 1 and 2.
  assert _period(cluster) == pytest.approx(1.3, abs=0.03)


def test_a_waiting_learner_that_hangs_holds_nobody_up():
  # Its connection stays; nobody hears that it is gone.
  cluster = _cluster(2, mode='wait', limit=0)
  hangs = cluster.learners[0]
  cluster.at(10.5, lambda: setattr(hangs, 'scan_seconds', lambda: 1e6))
  cluster.run(until=200.0)
  assert _period(cluster) == pytest.approx(1.3, abs=0.03)


@pytest.mark.parametrize('slowest', [4.0, 40.0])
@pytest.mark.parametrize('latency', [0.0, 0.1])
@pytest.mark.parametrize('k_min', [1, 2])
def test_one_fragment_is_not_paced_by_the_slowest(k_min, latency, slowest):
  # Learners train on. What a scan adds while the hand-over is in flight is
  # overwritten, so each learner hands over in every other scan: a round takes
  # one to two scans of the K_min-th fastest, with less than a scan of grace.
  # (It was two scans of the slowest.)
  speeds = (*SPEEDS[:3], slowest)
  grace = GraceOptions(gamma=0.9, overlap_scans=0.5)
  cluster = _run(k_min, speeds=speeds, latency=latency, grace=grace)
  pace = SPEEDS[k_min - 1]
  assert pace - 0.02 <= _period(cluster) <= 2 * pace + 0.1


@pytest.mark.parametrize('latency', [0.0, 0.1])
@pytest.mark.parametrize('k_min', [1, 2])
def test_one_fragment_that_keeps_progress_has_a_round_per_scan(k_min, latency):
  # Grace and network take less than a scan, so every scan is handed over.
  cluster = _run(
    k_min,
    speeds=(1.0, 1.001, 1.002, 4.0),
    latency=latency,
    grace=GraceOptions(gamma=0.9, overlap_scans=0.5),
    keeps_progress=True,
  )
  assert _period(cluster) == pytest.approx(1.0, abs=0.05)
  for m in range(3):
    assert cluster.participation(m, before=55) == pytest.approx(1.0, abs=0.05)


def test_learners_of_one_speed_share_their_rounds():
  # Not one round for each of them in every scan.
  cluster = _run(
    1,
    speeds=(1.0, 1.0001, 1.0002, 1.0003),
    latency=0.1,
    grace=GraceOptions(gamma=0.9, overlap_scans=0.5),
  )
  merges = [merge for merge in cluster.effects(fx.Merge) if merge.round < 55]
  assert all(len(merge.shares) == 4 for merge in merges)
  assert _period(cluster) == pytest.approx(2.0, abs=0.02)


def test_the_next_round_is_opened_when_the_grace_of_the_waiting_is_over():
  syncer = SyncerScript(
    M=3, H=1, P=1, joined=3, grace=GraceOptions(gamma=1.0, overlap_scans=0.5)
  )

  def opened(effects):
    return [
      e.message.round
      for e in effects
      if isinstance(e, fx.Broadcast) and isinstance(e.message, msg.RoundOpened)
    ]

  syncer.now = 1.0
  effects = syncer.contribute(0, 0)  # A scan of 1 s, since round 0 was opened.
  assert [e.round for e in effects if isinstance(e, fx.GraceBegan)] == [0]
  assert not opened(effects)
  syncer.now = 1.4
  assert not opened(syncer.contribute(1, 0))
  assert opened(syncer.wait(0.1)) == [1]
  syncer.done(0)
  # Learner 2's scan began before round 0 had its quorum, at 1 s, so it counts
  # after another.
  effects = syncer.contribute(2, 1)
  assert not [e for e in effects if isinstance(e, fx.GraceBegan)]
  assert syncer.state.wake_at == 2.0
  effects = syncer.wait(0.5)
  assert [e.round for e in effects if isinstance(e, fx.GraceBegan)] == [1]
