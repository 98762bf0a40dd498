"""Plain data parallelism: exact averages, and the time that they take."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from decoupled_diloco.protocol.syncer_state import BudgetOptions
from decoupled_diloco.simulate.options import (
  FailureOptions,
  Fault,
  LinkOptions,
  SpeedOptions,
)
from decoupled_diloco.virtual import LearnerSetup, data_parallel
from tests.virtual import small
from tests.virtual.small import TASK, K


def test_it_equals_a_plain_optax_loop_on_all_batches():
  setup = small.setup(M=3, sizes=(2, 4, 4), rounds=5)
  result = data_parallel.run(setup)
  params = jax.jit(TASK.init)(jax.random.key(0))
  state = setup.inner.init(params)
  for k in range(5 * K):
    parts = [learner.batches(k, 1) for learner in setup.learners]
    batch = {
      name: np.concatenate([part[name][0] for part in parts])
      for name in ('x', 'y')
    }
    grads = jax.grad(lambda p, b=batch: TASK.loss(p, b, jax.random.key(0))[0])(
      params
    )
    with jax.numpy_dtype_promotion('standard'):
      updates, state = setup.inner.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  small.close(result.params, params)
  assert result.reason == '5 rounds'
  # 10 examples in every step; half a second each; nothing is in the way.
  assert result.processed_tokens == result.merged_tokens == 100
  assert result.yield_ == 1.0
  assert result.seconds == 5.0
  assert result.goodput == 1.0


def _learners(*seconds: float, link: LinkOptions):
  return tuple(
    LearnerSetup(small.batches(m), SpeedOptions(each), link)
    for m, each in enumerate(seconds)
  )


def test_a_step_takes_the_slowest_learner_and_the_all_reduce():
  # 35 values of 4 bytes, of which each of two learners sends 2 (1 - 1/2) = 1
  # times: 140 bytes at 700 bytes/s are 0.2 s, and 0.1 s latency.
  link = LinkOptions(0.1, bytes_per_second=700.0)
  learners = _learners(0.5, 0.7, link=link)
  result = data_parallel.run(small.setup(rounds=10, learners=learners))
  assert result.seconds == pytest.approx(10 * K * (0.7 + 0.2 + 0.1))
  assert result.bytes_up == result.bytes_down == {0: 2800, 1: 2800}
  # Undisturbed: 4 examples in 0.5 s and 4 in 0.7 s, against 8 in 1 s.
  assert result.goodput == pytest.approx(8 / (4 / 0.5 + 4 / 0.7))


def test_everybody_waits_for_a_learner_that_is_away():
  failures = FailureOptions(
    (
      Fault(4.25, 1, 'kill', 3.0),
      # While it is away the other is cut off, too, and a second longer.
      Fault(5.25, 0, 'partition', 3.0),
      Fault(3.0, 1, 'join'),
    )
  )
  result = data_parallel.run(small.setup(rounds=5, failures=failures))
  # Ten steps of 0.5 s begin at 3; the third, from 4.0 on, is done again at
  # 8.25.
  assert result.seconds == pytest.approx(3.0 + 1.0 + 4.25 + 8 * 0.5)
  assert result.goodput == pytest.approx(5.0 / 9.25)
  random = FailureOptions(mean_seconds_between=8.0, mean_repair_seconds=1.0)
  first, second = (
    data_parallel.run(small.setup(rounds=30, failures=random)) for _ in range(2)
  )
  assert first.seconds == second.seconds > 33.0


def test_nobody_can_leave():
  setup = small.setup(failures=FailureOptions((Fault(1.0, 0, 'leave'),)))
  with pytest.raises(ValueError, match='cannot go on without a learner'):
    data_parallel.run(setup)


def test_budgets_and_evaluations():
  setup = small.setup(
    evaluate=lambda params: float(params['bias'][0]),
    evaluate_every_rounds=2,
  )
  seen = []
  tokens = BudgetOptions(merged_tokens=80)
  result = data_parallel.run(
    dataclasses.replace(
      setup, syncer=dataclasses.replace(setup.syncer, budget=tokens)
    ),
    seen.append,
  )
  assert result.reason == '80 merged tokens'
  assert tuple(seen) == result.points
  # 16 examples in a round.
  assert [p.rounds for p in result.points] == [0, 2, 4, 5]
  assert [p.merged_tokens for p in result.points] == [0, 32, 64, 80]
  assert [p.seconds for p in result.points] == [0, 2, 4, 5]
  assert result.loss == float(result.params['bias'][0])
  result = data_parallel.run(dataclasses.replace(setup, max_seconds=2.5))
  assert result.reason == '2.5 virtual seconds'
  with pytest.raises(FloatingPointError, match='diverged'):
    data_parallel.run(small.setup(inner=optax.sgd(1e30), rounds=50))
