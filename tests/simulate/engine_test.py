"""The engine without arrays: failures, speeds and links."""

import dataclasses
import itertools
import math
import random
import statistics

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.simulate import (
  Engine,
  EngineOptions,
  FailureOptions,
  Fault,
  LinkOptions,
  NoWork,
  SpeedOptions,
)
from decoupled_diloco.simulate.engine import scan_times
from decoupled_diloco.simulate.failures import random_faults
from tests.protocol.cluster_parts import syncer_options

M, P = 3, 3
OPTIONS = EngineOptions(
  syncer=syncer_options(
    M=M,
    H=2 * P,
    P=P,
    rounds=40,
    membership=MembershipOptions(
      M, liveness_timeout_seconds=6.0, start_timeout_seconds=2.0
    ),
  ),
  speeds=(SpeedOptions(0.5),) * M,
  links=(LinkOptions(0.05),) * M,
  detection_seconds=0.5,
)


def _run(**changes):
  """The syncer's tape of a run, and the engine."""
  tape = []
  work = NoWork((100,) * M, (50,) * P, (50,) * P, (80,) * P)
  engine = Engine(
    dataclasses.replace(OPTIONS, **changes),
    work,
    record=lambda event, effects: tape.append((event, tuple(effects))),
  )
  engine.run(until=1000.0)
  assert engine.end is not None
  return tape, engine


def _faults(*schedule):
  return FailureOptions(tuple(schedule))


def _times(tape, kind, learner):
  """When a message of a learner came, or what concerns it happened."""
  return [
    event.now
    for event, effects in tape
    for each in [event, getattr(event, 'message', None), *effects]
    if isinstance(each, kind) and getattr(each, 'learner', None) == learner
  ]


def test_a_whole_run():
  tape, engine = _run()
  # Rounds of a scan of a second each.
  drained = next(
    event.now
    for event, effects in tape
    for effect in effects
    if isinstance(effect, fx.Broadcast)
    and isinstance(effect.message, msg.DrainStarted)
  )
  assert drained == pytest.approx(41.0, abs=1.0)
  for learner in engine.learners:
    assert learner.end is not None
    figures = learner.figures
    assert figures.tokens == 100 * figures.scans > 4000
    assert figures.scan_seconds == pytest.approx(figures.scans * 1.0)
    # Latency of 0.1 s both ways: adopted at the boundary after next at most.
    overlap = figures.overlap_steps / figures.adopted
    assert overlap == pytest.approx(2.0, abs=0.2)
    seconds = figures.overlap_seconds / figures.adopted
    assert seconds == pytest.approx(1.0, abs=0.1)


def test_a_killed_learner_is_missed_after_a_while_and_comes_back():
  tape, engine = _run(failures=_faults(Fault(10.25, 1, 'kill', 5.0)))
  assert _times(tape, ev.ConnectionLost, 1) == [10.75]
  # Its hello takes the latency.
  assert _times(tape, msg.Hello, 1)[1] == pytest.approx(15.3)
  between = [at for at in _times(tape, msg.Contribution, 1) if 10.3 < at < 16.2]
  assert not between
  assert engine.learners[1].end is not None


def test_it_comes_back_before_it_was_missed():
  tape, _ = _run(failures=_faults(Fault(10.25, 1, 'kill', 0.2)))
  assert not _times(tape, ev.ConnectionLost, 1)
  assert _times(tape, fx.Disconnect, 1) == [pytest.approx(10.5)]
  assert _times(tape, msg.Contribution, 1)[-1] > 35.0


def test_of_a_silent_learner_only_the_silence_tells():
  tape, engine = _run(failures=_faults(Fault(10.25, 1, 'silent', 10.0)))
  assert not _times(tape, ev.ConnectionLost, 1)
  # Its last heartbeat or contribution came within the second before.
  lost = _times(tape, fx.Disconnect, 1)[0]
  assert 9.25 + 6.0 <= lost <= 10.3 + 6.0
  assert _times(tape, msg.Hello, 1)[1] == pytest.approx(20.3)
  # Meanwhile it trained on.
  assert engine.learners[1].figures.scans >= 40


def test_a_partition_that_both_sides_notice():
  tape, engine = _run(failures=_faults(Fault(10.25, 1, 'partition', 3.0)))
  assert _times(tape, ev.ConnectionLost, 1) == [10.75]
  assert _times(tape, msg.Hello, 1)[1] == pytest.approx(13.3)
  assert engine.learners[1].figures.scans >= 40


def test_a_partition_that_is_over_before_it_is_noticed():
  tape, _ = _run(failures=_faults(Fault(10.25, 1, 'partition', 0.2)))
  assert _times(tape, msg.Hello, 1)[1] == pytest.approx(10.5)
  assert _times(tape, msg.Contribution, 1)[-1] > 35.0


def test_one_joins_late_and_one_leaves():
  tape, engine = _run(
    failures=_faults(Fault(10.0, 2, 'join'), Fault(15.25, 0, 'leave'))
  )
  assert _times(tape, msg.Hello, 2) == [pytest.approx(10.05)]
  assert len(_times(tape, msg.Farewell, 0)) == 1
  # What it handed over with its farewell still counts.
  (at,) = _times(tape, msg.Farewell, 0)
  assert _times(tape, msg.Contribution, 0)[-1] == at
  assert _times(tape, ev.ConnectionLost, 0) == [at]
  end = engine.learners[0].end
  assert end is not None
  assert end.reason == 'it leaves'


def test_random_failures_are_those_of_the_seed():
  failures = FailureOptions(mean_seconds_between=15.0, mean_repair_seconds=2.0)
  first, _ = _run(failures=failures)
  again, _ = _run(failures=failures)
  other, _ = _run(failures=failures, seed=1)
  assert first == again
  assert first != other
  lost = sum(len(_times(first, ev.ConnectionLost, m)) for m in range(M))
  assert lost >= 3


def test_random_failures_have_the_means_that_were_asked_for():
  options = FailureOptions(mean_seconds_between=8.0, mean_repair_seconds=2.0)
  faults = random_faults(options, 0, 0)
  times = [next(faults) for _ in range(4000)]
  # Exponential: the standard error of the mean is mean / sqrt(4000) = 1.6 %.
  repair = statistics.fmean(fault.seconds for fault in times)
  assert repair == pytest.approx(2.0, rel=0.06)
  assert times[-1].at / 4000 == pytest.approx(8.0 + 2.0, rel=0.06)
  assert all(a.at + a.seconds < b.at for a, b in itertools.pairwise(times))
  assert not list(random_faults(FailureOptions(), 0, 0))


def test_scan_times_have_the_mean_and_the_variation_that_were_asked_for():
  draw = scan_times(SpeedOptions(0.5, 0.2), 4, random.Random(0))
  times = [draw() for _ in range(10000)]
  # Standard errors: 0.2 / 100 of the mean; about 0.75 % of the deviation.
  assert statistics.fmean(times) == pytest.approx(2.0, rel=0.006)
  assert statistics.stdev(times) == pytest.approx(0.4, rel=0.04)
  assert min(times) > 0
  assert scan_times(SpeedOptions(0.5), 4, random.Random(0))() == 2.0


@pytest.mark.parametrize(
  ('make', 'rule'),
  [
    (lambda: SpeedOptions(0.0), 'positive and finite'),
    (lambda: SpeedOptions(1.0, -0.1), 'must not be negative'),
    (lambda: LinkOptions(-1.0), 'finite and not negative'),
    (lambda: LinkOptions(loss=1.0), 'nothing ever arrives'),
    (lambda: LinkOptions(on_loss='gone'), "'damaged' or 'dropped'"),  # pyright: ignore
    (lambda: LinkOptions(up_queue=0), 'at least 1'),
    (lambda: Fault(0.0, 0, 'explode'), 'must be one of'),
    (lambda: Fault(math.inf, 0, 'kill'), 'finite'),
    (lambda: Fault(1.0, 0, 'kill', -1.0), 'not negative'),
    (lambda: FailureOptions(mean_repair_seconds=-1.0), 'not negative'),
    (
      lambda: _faults(Fault(1.0, 0, 'join'), Fault(2.0, 0, 'join')),
      'join once',
    ),
    (lambda: dataclasses.replace(OPTIONS, speeds=()), 'num_learners=3'),
    (lambda: dataclasses.replace(OPTIONS, merge_seconds=-1.0), 'finite'),
    (
      lambda: dataclasses.replace(
        OPTIONS, has_heartbeats=False, on_lead_limit='wait'
      ),
      'no sign of life',
    ),
    (
      lambda: dataclasses.replace(
        OPTIONS, failures=_faults(Fault(1.0, 3, 'kill'))
      ),
      'learners 0 to 2',
    ),
  ],
)
def test_options_that_cannot_be(make, rule):
  with pytest.raises(ValueError, match=rule):
    make()
