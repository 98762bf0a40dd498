"""A virtual cluster: deterministic, and its books are right."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from decoupled_diloco.observe.goodput import account
from decoupled_diloco.observe.status import fold
from decoupled_diloco.observe.tape import read_tape
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol.machine import replay
from decoupled_diloco.protocol.syncer import syncer_machine
from decoupled_diloco.simulate.options import (
  FailureOptions,
  Fault,
  LinkOptions,
  SpeedOptions,
)
from decoupled_diloco.virtual import LearnerSetup, VirtualCluster, held_out
from tests.virtual import small
from tests.virtual.small import INT4, TASK, K, contributions, run


def _eventful():
  """Everything that draws random numbers, at once."""
  link = LinkOptions(0.1, 300.0, loss=0.2)
  return small.setup(
    M=3,
    rounds=30,
    learners=tuple(
      LearnerSetup(small.batches(m), SpeedOptions(0.5 + 0.1 * m, 0.2), link)
      for m in range(3)
    ),
    wire=INT4,
    adopt=AdoptOptions('rebase'),
    failures=FailureOptions(
      (Fault(4.3, 1, 'kill', 3.0),),
      mean_seconds_between=20.0,
      mean_repair_seconds=2.0,
    ),
    merge_seconds=0.1,
    detection_seconds=0.5,
    seed=3,
  )


def test_the_same_setup_gives_the_same_bits(tmp_path):
  first, second = (
    VirtualCluster(_eventful()).run(),
    VirtualCluster(_eventful()).run(),
  )
  assert first.tape() == second.tape()
  assert small.same(first.params, second.params)
  assert first.training_losses == second.training_losses
  # Its tape is that of a real run: it replays, and tells the same figures.
  machine = syncer_machine(_eventful().syncer)
  assert replay(machine, first.steps) == len(first.steps) > 100
  first.write_tape(tmp_path / 'events.jsonl')
  status = fold(read_tape(tmp_path / 'events.jsonl'))
  assert status.merged_tokens == first.merged_tokens
  assert account(status).goodput == first.goodput
  other = VirtualCluster(dataclasses.replace(_eventful(), seed=4)).run()
  assert other.tape() != first.tape()


def test_learners_with_other_batch_sizes():
  result = run(M=3, sizes=(2, 6, 2), rounds=9, learners_at_once='vmap')
  (_, little), *_ = contributions(result, 0)
  (_, much), *_ = contributions(result, 1)
  assert (little.tokens, much.tokens) == (2 * K, 6 * K)
  merge = next(
    e for _, effects in result.steps for e in effects if isinstance(e, fx.Merge)
  )
  # The weight is tokens^2 / steps: 4^2 / 2 = 8 and 12^2 / 2 = 72.
  assert [share.weight for share in merge.shares] == [8.0, 72.0, 8.0]


def test_the_global_model_learns_and_the_books_are_kept():
  data = small.batches(9, 32)(0, 1)
  evaluate = held_out(TASK, [jax.tree.map(lambda leaf: leaf[0], data)])
  seen = []
  setup = small.setup(
    rounds=30,
    wire=INT4,
    evaluate=evaluate,
    evaluate_every_rounds=10,
  )
  result = VirtualCluster(setup, seen.append).run()
  assert tuple(seen) == result.points
  assert [p.rounds for p in result.points[:4]] == [0, 10, 20, 30]
  assert result.points[-1].rounds == result.rounds
  assert result.loss < 0.7 * result.points[0].loss
  assert result.loss == evaluate(result.params)
  assert result.reason == '30 rounds'
  assert result.participation == {0: 1.0, 1: 1.0}
  assert result.staleness == {0: 2 * result.rounds}
  assert result.mean_staleness == 0.0
  # What is handed over at the end of a scan is adopted at that of the next.
  assert result.overlap_steps == K
  # A scan of a second each, 2 x 4 tokens, for both; all of them are useful.
  scans = len(result.training_losses[0])
  assert result.processed_tokens == 2 * scans * 8
  assert result.yield_ is not None
  assert 0.6 < result.yield_ < 1.0  # A scan of three is overwritten.
  assert result.goodput == pytest.approx(1.0, abs=0.05)
  # Three fragments of 3, 20 and 12 values in blocks of 8, half a byte a value
  # (rounded up) and two a scale: 4, 16 and 10 bytes, and the initial values of
  # 4 x 35 bytes.
  assert sorted(setup.plan.sizes) == [3, 12, 20]
  sizes = {3: 2 + 2, 20: 10 + 3 * 2, 12: 6 + 2 * 2}
  up = sum(
    sizes[setup.plan.sizes[c.fragment]] for _, c in contributions(result, 0)
  )
  assert result.bytes_up == {0: up, 1: up}
  assert result.bytes_down == {0: up + 140, 1: up + 140}


def test_nothing_is_compiled_twice():
  setup = small.setup(
    M=3,
    rounds=200,
    wire=INT4,
    adopt=AdoptOptions('rebase'),
    learners_at_once='vmap',
  )
  cluster = VirtualCluster(setup)
  compiled = []

  def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    if 'backend_compile' in event:
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    # Three rounds for all fragments, one more for their adoption.
    cluster.engine.run(until=5.5)
    assert compiled
    compiled.clear()
    cluster.engine.run(until=30.5)
    assert not compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert cluster.work.stack.num_scan_programs == 1


def test_a_run_can_end_after_a_time():
  result = run(rounds=10**6, max_seconds=6.5)
  assert result.reason == '6.5 virtual seconds'
  # The scan that ran then is still merged.
  assert result.seconds == pytest.approx(7.0)


def test_a_diverging_learner_ends_the_run():
  with pytest.raises(FloatingPointError, match='diverged'):
    run(inner=optax.sgd(1e30), rounds=50)


def test_a_setup_that_cannot_be():
  with pytest.raises(ValueError, match='plan has 3 fragments'):
    dataclasses.replace(small.setup(P=3), syncer=small.setup(P=1).syncer)
  with pytest.raises(ValueError, match='rounds would wait for ever'):
    small.setup(k_min=2, failures=FailureOptions((Fault(1.0, 0, 'leave'),)))
  small.setup(
    k_min=2,
    failures=FailureOptions((Fault(1.0, 0, 'leave'),)),
    max_seconds=9.0,
  )
  with pytest.raises(ValueError, match='num_learners=2'):
    small.setup(M=2, learners=(LearnerSetup(small.batches(0)),))
  with pytest.raises(ValueError, match='limit of 0'):
    small.setup(limit=0)
  with pytest.raises(ValueError, match='must not be negative'):
    small.setup(snapshot_every_scans=-1)
  with pytest.raises(ValueError, match='must be positive'):
    small.setup(max_seconds=0.0)
  with pytest.raises(ValueError, match='learners_at_once'):
    small.setup(learners_at_once='two')
  flat = LearnerSetup(lambda first, count: {'x': np.zeros((count + 1, 1))})
  with pytest.raises(ValueError, match=r'stack so many batches'):
    VirtualCluster(small.setup(M=1, learners=(flat,)))
