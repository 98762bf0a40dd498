"""Which deltas are too large, and what becomes of their learners."""

import math
import random

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.messages import Reason
from decoupled_diloco.protocol.outliers import (
  OutlierOptions,
  Sample,
  outlier_guard,
)
from tests.protocol.scripts import SyncerScript, messages, reasons

NAN = ev.PayloadFacts(8, norm=None)


OPTIONS = OutlierOptions()


def _feed(samples, options=OPTIONS):
  """The objections to these samples of one fragment, in order."""
  guard = outlier_guard(options)
  state, objections = guard.init(), []
  for sample in samples:
    state, objection = guard.update(state, 0, sample)
    objections.append(objection)
  return objections


def _refused(samples, options=OPTIONS):
  return sum(objection is not None for objection in _feed(samples, options))


USUAL = [Sample(version, 24, 1.0) for version in range(8)]


@pytest.mark.parametrize(
  ('norm', 'steps', 'is_refused'),
  [
    (9.9, 24, False),
    (10.1, 24, True),
    (1e30, 24, True),
    (0.0, 24, False),  # Small is never too large.
    # 40 medians, in 40 times the steps: rounds had to wait.
    (40.0, 960, False),
    # 8 medians per step, and 5 in a single one: it has just adopted.
    (8.0, 1, False),
    (11.0, 1, True),
  ],
)
def test_too_large_is_as_a_whole_and_per_step(norm, steps, is_refused):
  objection = _feed([*USUAL, Sample(8, steps, norm)])[-1]
  assert (objection is not None) is is_refused


def test_the_objection_has_the_values():
  assert _feed([*USUAL, Sample(8, 24, 50.0)])[-1] == (
    'norm 50 in 24 steps is more than 10 x the median 1 of the last 8 accepted'
  )


def test_nothing_is_refused_before_there_are_versions():
  huge = Sample(3, 24, 1e9)
  assert _feed([*USUAL[:3], huge])[-1] is None
  assert _feed([*USUAL[:4], huge])[-1] is not None
  # Many learners in one version are not many versions.
  assert _feed([*[Sample(0, 24, 1.0)] * 50, huge])[-1] is None


def test_the_median_is_that_of_the_last_versions():
  grown = [Sample(8 + v, 24, 5.0) for v in range(8)]
  assert _feed([*USUAL, *grown, Sample(16, 24, 45.0)])[-1] is None
  assert _feed([*USUAL, Sample(8, 24, 45.0)])[-1] is not None


def test_what_was_refused_does_not_become_usual():
  huge = [Sample(8, 24, 1e3)] * 100
  assert _refused([*USUAL, *huge]) == 100


def test_fragments_have_their_own_medians():
  guard = outlier_guard(OutlierOptions())
  state = guard.init()
  for sample in USUAL:
    state, _ = guard.update(state, 0, sample)
  assert guard.update(state, 1, Sample(8, 24, 1e6))[1] is None


def test_where_nothing_moved_yet_nothing_is_usual():
  still = [Sample(v, 24, 0.0) for v in range(8)]
  assert _feed([*still, Sample(8, 24, 1.0)])[-1] is None


def test_memory_is_bounded():
  guard = outlier_guard(OutlierOptions(window=8))
  state = guard.init()
  for version in range(1000):
    for _ in range(4):
      state, _ = guard.update(state, 0, Sample(version, 24, 1.0))
  assert len(state.accepted[0]) == 32


# Healthy runs: not one contribution may be refused.


def test_healthy_norms_with_a_wide_spread():
  # Deviation of the logarithm 0.5: one norm in a million is exp(0.5 x 4.75),
  # 10.7 times the median.
  normal = random.Random(0)
  samples = [
    Sample(version, 24, normal.lognormvariate(0.0, 0.5))
    for version in range(500)
    for _ in range(8)
  ]
  assert _refused(samples) == 0


def test_a_learner_four_times_slower_with_deltas_four_times_larger():
  normal = random.Random(1)
  samples = []
  for version in range(400):
    samples += [
      Sample(version, 24, normal.lognormvariate(0.0, 0.3)) for _ in range(3)
    ]
    if version % 4 == 0:
      samples.append(Sample(version, 96, 4.0 * normal.lognormvariate(0.0, 0.3)))
  assert _refused(samples) == 0


@pytest.mark.parametrize('num_learners', [1, 2, 8, 16])
@pytest.mark.parametrize('warmup_steps', [10, 100, 1000])
@pytest.mark.parametrize('first', [0, 11, 23])
def test_a_warm_up_of_the_learning_rate(num_learners, warmup_steps, first):
  # H=24: fragment `first` is handed over after first + 1 steps, and then after
  # every 24. The delta is the sum of the rates, from 0 to their peak; then they
  # decay to nothing. The second delta of fragment 0 is 300 times the first.
  def rate(step):
    return min(step / warmup_steps, 1.0) * max(0.0, 1 - step / 20_000)

  samples, begin = [], 0
  for version in range(800):
    end = first + 1 + 24 * version
    norm = sum(rate(step) for step in range(begin, end))
    samples += [Sample(version, end - begin, norm)] * num_learners
    begin = end
  assert _refused(samples) == 0


def test_after_a_long_wait_for_the_quorum():
  # Rounds could not go ahead for a thousand scans; the learners trained on.
  # Whether deltas grow like the steps or like their root, they are welcome.
  for power in (0.5, 1.0):
    late = [Sample(8, 24_000, 1000**power)] * 2
    assert _refused([*USUAL, *late, *USUAL]) == 0


@pytest.mark.parametrize(
  ('fields', 'rule'),
  [
    ({'norm_factor': 1.0}, 'must be greater than 1'),
    ({'norm_factor': math.nan}, 'must be greater than 1'),
    ({'min_versions': 0}, 'must be at least 1'),
    ({'min_versions': 9, 'window': 8}, 'at most window=8'),
    ({'max_refusals': -1}, '0 quarantines nobody'),
  ],
)
def test_options_are_checked(fields, rule):
  with pytest.raises(ValueError, match=rule):
    OutlierOptions(**fields)


def test_infinity_refuses_none_for_its_size():
  options = OutlierOptions(norm_factor=math.inf)
  assert _refused([*USUAL, Sample(8, 24, 1e300)], options) == 0


# In the syncer machine.


def _syncer(**fields):
  """Two learners, one fragment; `min_versions` rounds are merged."""
  options = OutlierOptions(min_versions=2, max_refusals=3, **fields)
  syncer = SyncerScript(M=2, joined=2, H=1, P=1, outliers=options)
  for round_ in range(2):
    for m in (0, 1):
      syncer.contribute(m, round_)
    syncer.done(round_)
  return syncer


def _bad(syncer, n, payload=NAN):
  """The n-th unsound contribution of learner 1."""
  return syncer.contribute(1, syncer.state.current, payload, total_steps=10 + n)


def test_a_wildly_large_delta_is_refused():
  effects = _bad(_syncer(), 1, ev.PayloadFacts(8, norm=1e3))
  assert reasons(effects) == [Reason.OUTLIER]
  (refusal,) = messages(effects)
  assert isinstance(refusal, msg.Refusal)
  assert refusal.detail.startswith('norm 1e+03 in 1 steps')
  assert not [e for e in effects if isinstance(e, fx.Accept)]


@pytest.mark.parametrize(
  ('payload', 'reason'),
  [
    (NAN, 'not_finite'),
    (ev.PayloadFacts(8, norm=1e3), 'outlier'),
    (ev.PayloadFacts(8, norm=None, fits_layout=False), 'wrong_layout'),
  ],
)
def test_several_in_a_row_quarantine_a_learner(payload, reason):
  syncer = _syncer()
  for n in (1, 2):
    assert len(_bad(syncer, n, payload)) == 1
  effects = _bad(syncer, 3, payload)
  disconnect = next(e for e in effects if isinstance(e, fx.Disconnect))
  assert (disconnect.learner, disconnect.is_final) == (1, True)
  assert disconnect.reason.startswith(
    f'learner 1 is quarantined: 3 unsound contributions in a row, the last one '
    f'{reason} ('
  )
  assert fx.Notice(disconnect.reason) in effects
  assert syncer.state.connected == (0,)
  # The others go on without it.
  assert [e.round for e in _alone(syncer) if isinstance(e, fx.Merge)] == [2]


def _alone(syncer):
  return syncer.contribute(0, syncer.state.current)


def test_a_sound_one_between_begins_the_count_anew():
  syncer = _syncer()
  _bad(syncer, 1)
  _bad(syncer, 2)
  assert not reasons(_bad(syncer, 3, ev.PayloadFacts(8, norm=1.0)))
  _alone(syncer)
  syncer.done(2)
  _bad(syncer, 4)
  _bad(syncer, 5)
  assert syncer.state.connected == (0, 1)


def test_copies_and_damage_on_the_way_count_for_nothing():
  syncer = _syncer()
  for _ in range(10):
    _bad(syncer, 1)
  for n in range(2, 12):
    _bad(syncer, n, ev.PayloadFacts(8, is_intact=False, norm=None))
  assert syncer.state.connected == (0, 1)


def test_a_quarantined_process_stays_away_and_another_may_come():
  syncer = _syncer()
  for n in (1, 2, 3):
    _bad(syncer, n)
  (rejection,) = messages(syncer.hello(1, run_id='run', incarnation=2))
  assert isinstance(rejection, msg.Rejection)
  assert 'is quarantined' in rejection.reason
  syncer.join(1)
  assert syncer.state.connected == (0, 1)
  for n in (4, 5):
    _bad(syncer, n)
  assert syncer.state.connected == (0, 1)  # Its count began anew.


def test_a_new_connection_of_the_same_process_keeps_the_count():
  syncer = _syncer()
  _bad(syncer, 1)
  _bad(syncer, 2)
  syncer.lose(1)
  syncer.join(1, run_id='run', incarnation=2)
  _bad(syncer, 3)
  assert syncer.state.connected == (0,)


def test_nobody_is_quarantined_if_that_is_not_wanted():
  syncer = SyncerScript(M=2, joined=2, outliers=OutlierOptions(max_refusals=0))
  for n in range(20):
    _bad(syncer, n)
  assert syncer.state.connected == (0, 1)
