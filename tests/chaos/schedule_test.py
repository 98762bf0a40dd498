"""Faults are drawn once from a seed, as often and of the kinds asked for."""

import collections
import itertools

import pytest

from decoupled_diloco.chaos.schedule import KINDS, Fault, FaultOptions, faults


def first(count, num_learners=4, **options) -> list[Fault]:
  found = faults(FaultOptions(**options), num_learners)
  return list(itertools.islice(found, count))


def test_the_same_seed_gives_the_same_faults():
  assert first(50, seed=3) == first(50, seed=3)
  assert first(50, seed=3) != first(50, seed=4)


def test_times_and_kinds_are_as_asked_for():
  found = first(
    4000,
    mean_seconds_between=10.0,
    weights={'kill': 3.0, 'freeze': 1.0},
    mean_seconds={'freeze': 2.0},
  )
  times = [fault.at_seconds for fault in found]
  assert times == sorted(times)
  # Of 4,000 exponential times the mean has a deviation of 10 / 63.
  assert times[-1] / 4000 == pytest.approx(10.0, abs=0.8)
  kinds = collections.Counter(fault.kind for fault in found)
  assert kinds['kill'] / 4000 == pytest.approx(0.75, abs=0.04)
  assert set(kinds) == {'kill', 'freeze'}
  lasting = [fault.seconds for fault in found if fault.kind == 'freeze']
  assert sum(lasting) / len(lasting) == pytest.approx(2.0, abs=0.4)
  assert all(not fault.seconds for fault in found if fault.kind == 'kill')
  victims = collections.Counter(fault.learners for fault in found)
  assert sorted(victims) == [(0,), (1,), (2,), (3,)]
  assert min(victims.values()) > 800


def test_every_kind_occurs_and_can_be_told():
  found = first(200, weights=dict.fromkeys(KINDS, 1.0), sites=((0, 1), (2, 3)))
  assert {fault.kind for fault in found} == set(KINDS)
  for fault in found:
    if fault.kind == 'syncer':
      assert fault.learners == () and str(fault) == 'kills the syncer'
    if fault.kind == 'site':
      assert fault.learners in ((0, 1), (2, 3))
  assert str(Fault(1.0, 'freeze', (2,), 3.0)) == 'freezes learner 2 for 3.0 s'
  assert str(Fault(1.0, 'site', (0, 1))) == 'kills a site: learners 0, 1'


def test_who_is_spared_is_not_killed():
  found = first(
    300,
    mean_seconds_between=1.0,
    weights={'kill': 1.0, 'syncer': 1.0, 'freeze': 1.0},
    spare=((0, 0.0), ('syncer', 100.0)),
  )
  assert not [f for f in found if f.kind == 'kill' and f.learners == (0,)]
  assert [f for f in found if f.kind == 'freeze' and f.learners == (0,)]
  killed = [f.at_seconds for f in found if f.kind == 'syncer']
  assert killed and max(killed) < 100.0


def test_a_schedule_is_merged_with_what_is_drawn():
  schedule = ((5.0, 'syncer', (), 0.0), (1.0, 'partition', (2,), 4.0))
  found = list(
    faults(FaultOptions(mean_seconds_between=0, schedule=schedule), 3)
  )
  assert found == [
    Fault(1.0, 'partition', (2,), 4.0),
    Fault(5.0, 'syncer', ()),
  ]
  both = first(10, mean_seconds_between=1.0, max_faults=8, schedule=schedule)
  assert len(both) == 10
  assert both == sorted(both)


@pytest.mark.parametrize(
  'options, part',
  [
    ({'mean_seconds_between': -1.0}, 'must not be negative'),
    ({'weights': {'kil': 1.0}}, "the kind 'kil'"),
    ({'weights': {'kill': -1.0}}, "weights['kill']=-1.0 must not be"),
    ({'weights': {}}, 'must have a kind with a positive weight'),
    ({'weights': {'site': 1.0}}, 'sites=() names none'),
    ({'mean_seconds': {'kill': 1.0}}, 'must be one of freeze, partition'),
    ({'schedule': ((1.0, 'kill'),)}, 'must be faults (second, kind'),
    ({'schedule': ((1.0, 'kill', (), 0.0),)}, 'must be faults (second, kind'),
    ({'spare': (('sincer', 1.0),)}, 'must be pairs of a learner'),
  ],
)
def test_mistakes(options, part):
  with pytest.raises(ValueError) as caught:
    FaultOptions(**options)
  assert part in str(caught.value)


def test_learners_that_there_are_not():
  options = FaultOptions(sites=((0, 7),))
  with pytest.raises(ValueError, match='name learner 7; name one of 0 to 3'):
    options.check_learners(4)
  options.check_learners(8)


@pytest.mark.parametrize(
  'weights, is_right',
  [
    ({'kill': 1.0}, False),
    ({'kill': 1.0, 'site': 1.0, 'syncer': 1.0, 'freeze': 0.0}, False),
    ({'kill': 1.0, 'freeze': 1.0}, True),
  ],
)
def test_somebody_must_be_left(weights, is_right):
  """Otherwise the next fault would be looked for for ever."""
  spare = ((0, 0.0), (1, 50.0), ('syncer', 9.0))
  options = FaultOptions(weights=weights, spare=spare, sites=((0, 1),))
  if is_right:
    options.check_learners(2)
    return
  with pytest.raises(ValueError, match='leaves nobody'):
    options.check_learners(2)
  options.check_learners(3)  # The third can be killed.
