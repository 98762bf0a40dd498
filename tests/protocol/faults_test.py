"""Learners come and go at any time: the run ends, and work is conserved.

With the adoption rule `rebase` a learner keeps what no merge has seen, so that
tokens obey a law of conservation: of each learner and fragment, never more is
merged than was processed; and of one that was there to the end, exactly that.
"""

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.syncer_state import BudgetOptions
from tests.protocol.cluster import TOKENS_PER_STEP, Cluster, syncer_options

# When the run is asked to drain: no fault is felt any more.
STOP_AT = 60.0


@dataclasses.dataclass(frozen=True)
class Fault:
  """A learner is 'cut' off, cut off 'silently', or 'killed', for a while.

  Or the 'syncer' is killed, whatever the learner.
  """

  kind: str
  learner: int
  at: float
  seconds: float


@dataclasses.dataclass(frozen=True)
class Setting:
  """A cluster, and what it goes through."""

  M: int
  P: int
  k_min: int
  limit: int
  mode: str
  latency: float
  bulk_seconds: float
  merge_seconds: float
  overlap_scans: float
  liveness: float
  speeds: tuple[float, ...]
  faults: tuple[Fault, ...]


@st.composite
def _settings(draw, kinds=('cut', 'silently', 'killed')):
  M = draw(st.integers(1, 4))
  mode = draw(st.sampled_from(['train', 'train', 'wait']))
  faults = st.builds(
    Fault,
    st.sampled_from(kinds),
    st.integers(0, M - 1),
    st.floats(0.0, 20.0),
    st.sampled_from([0.0, 0.2, 1.0, 5.0, 12.0]),
  )
  limits = [1, 2, 4, 8] if mode == 'train' else [0, 1, 4]
  return Setting(
    M=M,
    P=draw(st.sampled_from([1, 2, 3, 6])),
    k_min=draw(st.integers(1, M)),
    limit=draw(st.sampled_from(limits)),
    mode=mode,
    latency=draw(st.sampled_from([0.0, 0.05, 0.4, 1.5])),
    bulk_seconds=draw(st.sampled_from([0.0, 0.3, 2.0])),
    merge_seconds=draw(st.sampled_from([0.0, 0.3, 1.5])),
    overlap_scans=draw(st.sampled_from([0.0, 1.0, 2.0, 4.0])),
    liveness=draw(st.sampled_from([5.0, 1e6])),
    speeds=tuple(
      draw(st.sampled_from([1.0, 1.18, 2.0, 3.0])) for _ in range(M)
    ),
    faults=tuple(draw(st.lists(faults, max_size=6))),
  )


def _build(
  setting: Setting, stop_at: float = STOP_AT, **settings: Any
) -> Cluster:
  normal = random.Random(0)
  options = syncer_options(
    M=setting.M,
    k_min=setting.k_min,
    H=setting.P,
    P=setting.P,
    max_rounds_in_flight=setting.limit,
    grace=GraceOptions(overlap_scans=setting.overlap_scans),
    budget=BudgetOptions(10**6, 0, drain_seconds=200.0, stop_seconds=200.0),
    membership=MembershipOptions(
      num_learners=setting.M,
      heartbeat_seconds=1.0,
      liveness_timeout_seconds=setting.liveness,
      start_timeout_seconds=10.0,
    ),
  )
  scans = [
    lambda seconds=seconds: seconds * max(0.5, normal.gauss(1.0, 0.1))
    for seconds in setting.speeds
  ]
  cluster = Cluster(
    options,
    scans,
    latency=setting.latency,
    bulk_seconds=setting.bulk_seconds,
    merge_seconds=setting.merge_seconds,
    on_lead_limit=setting.mode,
    keeps_progress=True,
    heartbeats=True,
    **settings,
  )
  for fault in setting.faults:
    cluster.at(fault.at, lambda fault=fault: _strike(cluster, fault))
  stop = ev.StopRequested(stop_at, 'enough')
  cluster.at(stop_at, lambda: cluster.syncer.tell(stop))
  return cluster


def _strike(cluster: Cluster, fault: Fault) -> None:
  m = fault.learner
  if fault.kind == 'syncer':
    if cluster.syncer.is_alive:
      cluster.kill_syncer()
      cluster.at(cluster.now + fault.seconds, cluster.start_syncer)
    return
  if not cluster.learners[m].is_alive or cluster.is_partitioned(m):
    return
  back = cluster.now + fault.seconds
  if fault.kind == 'killed':
    cluster.kill(m)
    cluster.at(back, lambda: cluster.start(m))
  else:
    cluster.partition(m, is_noticed=fault.kind == 'cut')
    cluster.at(back, lambda: cluster.heal(m))


def _check(cluster: Cluster, lives_on: set[int]) -> None:
  """The run has ended, and the tokens of those who live on are all merged."""
  assert cluster.end is not None
  assert all(
    learner.end is not None and not learner.end.is_failure
    for learner in cluster.learners
  )
  cluster.assert_no_token_is_merged_twice()
  merged = cluster.merged_tokens()
  for m, learner in enumerate(cluster.learners):
    processed = TOKENS_PER_STEP * learner.figures.scans
    for p in range(cluster.options.schedule.num_fragments):
      if m in lives_on:
        assert merged[m, p] == processed
      else:
        assert merged[m, p] <= processed


@settings(max_examples=60)
@given(_settings())
def test_work_is_conserved_whatever_happens(setting):
  cluster = _build(setting).run(until=5000.0)
  killed = {f.learner for f in setting.faults if f.kind == 'killed'}
  _check(cluster, set(range(setting.M)) - killed)


@settings(max_examples=100)
@given(
  _settings(kinds=('syncer', 'syncer', 'cut', 'killed')),
  st.sampled_from([0, 1, 2, 5]),
)
def test_work_is_conserved_though_the_syncer_is_killed(setting, snapshots):
  cluster = _build(setting, snapshot_every_scans=snapshots).run(until=5000.0)
  killed = {f.learner for f in setting.faults if f.kind == 'killed'}
  _check(cluster, set(range(setting.M)) - killed)


SOUND = ev.PayloadFacts(8, norm=1.0)
NAN = ev.PayloadFacts(8, norm=None)
DAMAGED = ev.PayloadFacts(8, is_intact=False, norm=None)


@settings(max_examples=60)
@given(_settings(kinds=('cut', 'silently')), st.integers(0, 2**32))
def test_work_is_conserved_on_a_bad_wire(setting, seed):
  # A third of the contributions is damaged, not finite, repeated or dropped
  # before it is sent, while links break as well.
  dice = random.Random(seed)

  def arrivals(contribution):
    if cluster.now > 25.0 or dice.random() > 0.3:
      return (SOUND,)
    what = dice.choice(['damaged', 'nan', 'repeated', 'dropped'])
    if what == 'dropped':
      return ()
    return {
      'damaged': (DAMAGED,),
      'nan': (NAN,),
      'repeated': (SOUND, SOUND, DAMAGED),
    }[what]

  cluster = _build(setting, arrivals=arrivals)
  _check(cluster.run(until=5000.0), set(range(setting.M)))


@pytest.mark.parametrize('kind', ['cut', 'silently', 'killed'])
def test_participation_recovers(kind):
  setting = Setting(
    M=4,
    P=6,
    k_min=1,
    limit=8,
    mode='train',
    latency=0.05,
    bulk_seconds=0.0,
    merge_seconds=0.0,
    overlap_scans=2.0,
    liveness=5.0,
    speeds=(1.0,) * 4,
    faults=(Fault(kind, 2, 20.0, 20.0),),
  )
  cluster = _build(setting, stop_at=100.0).run(until=5000.0)
  merges = cluster.effects(fx.Merge)

  def taken(rounds):
    shares = [merge.shares for merge in merges if merge.round in rounds]
    assert len(shares) == len(rounds)
    return sum(2 in {s.learner for s in share} for share in shares)

  # One round per second: in all of them before, in none while it is away (but
  # for two that it has proposed or that are in their grace), and again in all.
  assert taken(range(2, 18)) >= 15
  assert taken(range(22, 38)) == 0
  assert taken(range(44, 95)) >= 49


def test_everybody_is_away_for_a_while():
  setting = Setting(
    M=3,
    P=3,
    k_min=3,
    limit=4,
    mode='train',
    latency=0.05,
    bulk_seconds=0.0,
    merge_seconds=0.1,
    overlap_scans=2.0,
    liveness=5.0,
    speeds=(1.0, 1.1, 1.2),
    faults=tuple(Fault('killed', m, 10.0 + m, 10.0) for m in range(3)),
  )
  cluster = _build(setting).run(until=5000.0)
  _check(cluster, set())
  notices = [notice.text for notice in cluster.effects(fx.Notice)]
  assert any('0 of 3 required learners' in text for text in notices)
  assert 'Rounds go on: enough learners are connected.' in notices
