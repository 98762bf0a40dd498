"""Contributions in any order, lost, repeated, damaged: what is merged then."""

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.weights import StalenessOptions
from tests.protocol.scripts import SOUND, SyncerScript, messages, reasons

M, P = 3, 3
NAN = ev.PayloadFacts(8, norm=None)
DAMAGED = ev.PayloadFacts(8, is_intact=False, norm=None)
TOO_LONG = ev.PayloadFacts(8, norm=None, fits_layout=False)


@dataclasses.dataclass(frozen=True)
class Arrival:
  """A contribution of a learner, for a round relative to the current one."""

  learner: int
  ahead: int
  age: int = 0
  payload: ev.PayloadFacts = SOUND
  steps: int = 1
  wrong_fragment: bool = False
  old_incarnation: bool = False


@dataclasses.dataclass(frozen=True)
class Other:
  """Something else: 'wait', 'merge', 'lose' or 'join'."""

  what: str
  learner: int = 0
  seconds: float = 0.0


_ARRIVALS = st.builds(
  Arrival,
  learner=st.integers(0, M - 1),
  ahead=st.sampled_from([-4, -1, 0, 0, 0, 0, 1, 1, 1, 2, 5, 6]),
  age=st.sampled_from([0, 0, 0, 1, 2, -1]),
  payload=st.sampled_from([SOUND, SOUND, SOUND, NAN, DAMAGED, TOO_LONG]),
  steps=st.sampled_from([1, 1, 1, 0]),
  wrong_fragment=st.sampled_from([False] * 5 + [True]),
  old_incarnation=st.sampled_from([False] * 5 + [True]),
)
_SOUND_ARRIVALS = st.builds(
  Arrival, learner=st.integers(0, M - 1), ahead=st.integers(-1, 3)
)
_OTHERS = st.one_of(
  st.builds(Other, st.just('wait'), seconds=st.floats(0.0, 3.0)),
  st.just(Other('merge')),
  st.builds(
    Other, st.sampled_from(['lose', 'join']), learner=st.integers(0, M - 1)
  ),
)
_ACTIONS = st.lists(
  st.one_of(_SOUND_ARRIVALS, _ARRIVALS, _OTHERS), min_size=20, max_size=80
)


def _merging(syncer):
  return [r for r, x in syncer.state.rounds.items() if x.stage == 'merging']


def _arrive(syncer, action, copies):
  round_ = syncer.state.current + action.ahead
  fragment = syncer.options.schedule.fragment_of(round_)
  contribution = syncer.contribution(
    action.learner,
    round_,
    fragment=(fragment + action.wrong_fragment) % P,
    base_version=syncer.state.versions[fragment] - action.age,
    steps=action.steps,
    incarnation=syncer.incarnations[action.learner] - action.old_incarnation,
  )
  for _ in range(copies):
    syncer.say(contribution, action.payload)


def _play(actions, k_min, copies=1, max_staleness=1):
  """Plays the actions, then lets the run drain and end."""
  syncer = SyncerScript(
    M=M,
    k_min=k_min,
    H=P,
    P=P,
    joined=M,
    rounds=10**6,
    grace=GraceOptions(cap_seconds=2.0),
    staleness=StalenessOptions(max_staleness=max_staleness),
  )
  for action in actions:
    match action:
      case Arrival():
        _arrive(syncer, action, copies)
      case Other('wait'):
        syncer.wait(action.seconds)
      case Other('merge') if _merging(syncer):
        syncer.done(_merging(syncer)[0])
      case Other('lose'):
        syncer.lose(action.learner)
      case Other('join'):
        syncer.join(action.learner)
  syncer.tell(ev.StopRequested(syncer.now, 'enough'))
  syncer.wait(100.0)
  while _merging(syncer):
    syncer.done(_merging(syncer)[0])
  assert syncer.effects(fx.Save)
  return syncer


def _is_drain(effects):
  return any(isinstance(m, msg.DrainStarted) for m in messages(effects))


@settings(max_examples=100)
@given(_ACTIONS, st.integers(1, M))
def test_whatever_arrives(actions, k_min):
  syncer = _play(actions, k_min)
  # Each accepted payload is merged once or discarded once, no round twice.
  syncer.merged_tokens()
  versions, busy, is_draining = [0] * P, set(), False
  for event, effects in syncer.tape:
    is_draining = is_draining or _is_drain(effects)
    if isinstance(event, ev.MergeDone):
      busy.remove(event.round % P)
    for merge in effects:
      if not isinstance(merge, fx.Merge):
        continue
      learners = [share.learner for share in merge.shares]
      assert len(set(learners)) == len(learners)
      assert len(learners) >= (1 if is_draining else k_min)
      # Versions count by one; one merge at a time for each fragment.
      assert merge.fragment == merge.round % P
      assert merge.fragment not in busy
      busy.add(merge.fragment)
      versions[merge.fragment] += 1
      assert merge.version == versions[merge.fragment]
  assert tuple(versions) == syncer.state.versions
  assert not busy


@settings(max_examples=100)
@given(_ACTIONS, st.integers(1, M))
def test_every_contribution_has_one_answer_and_unsound_ones_are_refused(
  actions, k_min
):
  for event, effects in _play(actions, k_min).tape:
    if not isinstance(event, ev.MessageArrived):
      continue
    entry = event.message
    if not isinstance(entry, msg.Contribution):
      continue
    accepts = [e for e in effects if isinstance(e, fx.Accept)]
    refusals = [
      m
      for m in messages(effects)
      if isinstance(m, msg.Refusal)
      and (m.learner, m.round) == (entry.learner, entry.round)
    ]
    if not accepts:
      assert len(refusals) == 1
      continue
    assert accepts == [fx.Accept(entry.learner, entry.round)]
    assert event.payload == SOUND
    assert entry.steps > 0
    assert entry.fragment == entry.round % P
    assert entry.base_version >= 0


@settings(max_examples=100)
@given(_ACTIONS, st.integers(1, M), st.integers(2, 3))
def test_copies_change_nothing(actions, k_min, copies):
  # Every contribution arrives two or three times: the same merges, whoever is
  # in them, and every copy is refused.
  once, often = _play(actions, k_min), _play(actions, k_min, copies)
  assert once.effects(fx.Merge) == often.effects(fx.Merge)
  assert once.state.versions == often.state.versions
  arrived = sum(
    isinstance(event, ev.MessageArrived)
    and isinstance(event.message, msg.Contribution)
    for event, _ in often.tape
  )
  accepted = len(often.effects(fx.Accept))
  refused = sum(
    len(reasons(effects))
    for event, effects in often.tape
    if isinstance(event, ev.MessageArrived)
  )
  assert arrived <= accepted + refused
  assert accepted == len(once.effects(fx.Accept))


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_a_quorum_of_all_does_not_depend_on_the_order(seed, num_rounds):
  # All learners are in all rounds, whichever way their contributions mix.
  syncer = SyncerScript(
    M=M, k_min=M, joined=M, rounds=100, max_rounds_in_flight=8
  )
  arrivals = [(m, r) for m in range(M) for r in range(num_rounds)]
  random.Random(seed).shuffle(arrivals)
  for m, round_ in arrivals:
    assert not reasons(syncer.contribute(m, round_))
  merges = syncer.effects(fx.Merge)
  assert sorted(merge.round for merge in merges) == list(range(num_rounds))
  for merge in merges:
    assert [share.learner for share in merge.shares] == [0, 1, 2]


def test_two_rounds_of_a_fragment_are_merged_in_their_order():
  # Merged first, the later one would make the learners of the earlier one take
  # their work in it for unmerged.
  syncer = SyncerScript(
    M=3, H=3, P=3, joined=3, max_rounds_in_flight=8, grace=GraceOptions(decay=0)
  )
  for m in range(3):
    syncer.contribute(m, 0, step_seconds=10.0)
  syncer.done(0)
  syncer.say(msg.Receipt(0, syncer.incarnations[0], 0))
  # Learner 0's scans of 10 s give round 1 a grace of 0.9 x 2 x 10 = 18 s. Then
  # it speeds up, and the rounds from 2 on have one of 0.18 s.
  for round_, seconds in [(1, 10.0), (2, 10.0), (3, 0.1), (4, 0.1), (5, 0.1)]:
    syncer.contribute(0, round_, step_seconds=seconds)
  effects = syncer.wait(1.0)
  assert [e.round for e in effects if isinstance(e, fx.Merge)] == [1, 2, 3]
  assert [e.round for e in syncer.done(1) if isinstance(e, fx.Merge)] == [4]


def test_too_few_left_after_staleness_are_not_merged():
  syncer = SyncerScript(
    M=3,
    k_min=2,
    H=1,
    P=1,
    joined=3,
    staleness=StalenessOptions(max_staleness=1),
  )
  for round_ in (0, 1):
    for m in range(3):
      syncer.contribute(m, round_, base_version=0)
  syncer.done(0)
  # While round 1 is merged into version 2, round 2 gathers its contributions,
  # of which only one starts from version 1.
  for m, base_version in [(0, 1), (1, 0), (2, 0)]:
    assert not reasons(syncer.contribute(m, 2, base_version=base_version))
  effects = syncer.done(1)
  assert reasons(effects) == [
    msg.Reason.STALE,
    msg.Reason.STALE,
    msg.Reason.NO_QUORUM,
  ]
  discarded = [e.learner for e in effects if isinstance(e, fx.Discard)]
  assert sorted(discarded) == [0, 1, 2]
  assert 2 not in syncer.state.rounds
  assert syncer.state.versions == (2,)
  # Whoever comes too late for it is not left to wait for its publication.
  assert reasons(syncer.contribute(0, 2)) == [msg.Reason.NO_QUORUM]
  assert reasons(syncer.contribute(0, 1)) == [msg.Reason.DUPLICATE]
