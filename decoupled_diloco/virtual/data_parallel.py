"""Plain data parallelism of the same learners: the method to compare with.

Gradients are averaged exactly after every step, so there is one training state,
and its batch is that of all learners together. A step takes as long as the
slowest learner's, and then as long as a bandwidth-optimal all-reduce over the
slowest link: 2 (1 - 1/M) size / rate + latency (Scaling laws for DiLoCo,
Charles et al., arXiv 2503.09799, idealised wall-clock time). It is rigid: while
one learner is away, all wait for its return, and the step that it was taken
from is done again.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from decoupled_diloco.simulate.engine import scan_times
from decoupled_diloco.simulate.failures import random_faults
from decoupled_diloco.simulate.options import FailureOptions, Fault
from decoupled_diloco.training.mesh import MeshOptions, make_mesh
from decoupled_diloco.training.step import make_train_scan
from decoupled_diloco.virtual.result import Point, Result
from decoupled_diloco.virtual.setup import VirtualSetup

_BYTES_PER_VALUE = 4


def run(
  setup: VirtualSetup,
  on_point: Callable[[Point], object] = lambda point: None,
) -> Result:
  """Trains to the setup's budget.

  A round's worth of steps (K) makes a round; nothing else of how learners
  synchronise is used.

  Args:
    setup: the cluster.
    on_point: told of every evaluation, as it is made.

  Raises:
    FloatingPointError: if the loss is not finite.
    ValueError: if a learner leaves for good: nobody could go on.
  """
  clock = _Clock(setup)
  steps = setup.syncer.schedule.steps_per_scan
  trainer = make_train_scan(
    setup.task,
    setup.inner,
    make_mesh(MeshOptions()),
    steps_per_scan=steps,
    learning_rate=setup.learning_rate,
  )
  initial = setup.initial_params()
  state = trainer.init_from(initial, setup.stream(0))
  points: list[Point] = []
  losses: list[float] = []
  tokens = 0

  def evaluate() -> None:
    if setup.evaluate is None:
      return
    loss = setup.evaluate(state.params)
    points.append(Point(clock.now, float(tokens), len(losses), loss))
    on_point(points[-1])

  evaluate()
  reason = None
  while reason is None:
    batches = _joined(setup, len(losses) * steps, steps)
    state, metrics = trainer.scan(state, batches, len(losses) * steps)
    losses.append(float(metrics['loss']))
    if not math.isfinite(losses[-1]):
      raise FloatingPointError(
        f'The training loss is {losses[-1]} in round {len(losses) - 1}: the '
        'inner optimizer has diverged. Lower inner.learning_rate, or clip more.'
      )
    clock.take_scan()
    tokens += steps * setup.task.num_tokens(_first(batches))
    reason = _reason_to_end(setup, clock.now, len(losses), tokens)
    every = setup.evaluate_every_rounds
    if reason or (every and len(losses) % every == 0):
      evaluate()
  learners = range(len(setup.learners))
  moved = round(clock.bytes_per_step * len(losses) * steps)
  return Result(
    points=tuple(points),
    params=state.params,
    reason=reason,
    seconds=clock.now,
    rounds=len(losses),
    processed_tokens=tokens,
    merged_tokens=float(tokens),
    goodput=tokens / clock.capacity_tokens,
    participation={m: 1.0 for m in learners},
    staleness={0: len(losses) * len(learners)},
    bytes_up={m: moved for m in learners},
    bytes_down={m: moved for m in learners},
    overlap_steps=0.0,
    training_losses=(tuple(losses),),
  )


class _Clock:
  """The time that steps take, failures included."""

  def __init__(self, setup: VirtualSetup):
    self._setup = setup
    schedule = setup.syncer.schedule
    self._steps = schedule.steps_per_scan
    M = len(setup.learners)
    size = _BYTES_PER_VALUE * setup.plan.num_elements
    self.bytes_per_step = 2 * (1 - 1 / M) * size
    self._reduce_seconds = _reduce_seconds(setup, self.bytes_per_step)
    self._scan_seconds = [
      scan_times(
        learner.speed, self._steps, random.Random(f'{setup.seed} scans {m}')
      )
      for m, learner in enumerate(setup.learners)
    ]
    self._faults = _faults(setup.failures, M, setup.seed)
    self._next = next(self._faults, None)
    # It cannot begin before everybody is there.
    self._began_at = max(map(setup.failures.joins_at, range(M)))
    self.now = self._began_at

  def take_scan(self) -> None:
    """Goes on by K steps."""
    slowest = max(draw() for draw in self._scan_seconds) / self._steps
    for _ in range(self._steps):
      self._take_step(slowest + self._reduce_seconds)

  def _take_step(self, seconds: float) -> None:
    while self._next is not None and self._next.at < self.now + seconds:
      self.now = max(self.now, self._next.at + self._next.seconds)
      self._next = next(self._faults, None)
    self.now += seconds

  @property
  def capacity_tokens(self) -> float:
    """What all learners would have processed by now, each on its own."""
    rates = [
      self._setup.task.num_tokens(_first(learner.batches(0, 1)))
      / learner.speed.step_seconds
      for learner in self._setup.learners
    ]
    return sum(rates) * (self.now - self._began_at)


def _reduce_seconds(setup: VirtualSetup, num_bytes: float) -> float:
  if len(setup.learners) == 1:
    return 0.0
  links = [learner.link for learner in setup.learners]
  latency = max(link.latency_seconds for link in links)
  rates = [link.bytes_per_second for link in links if link.bytes_per_second]
  return latency + (num_bytes / min(rates) if rates else 0.0)


def _faults(options: FailureOptions, M: int, seed: int) -> Iterator[Fault]:
  """All faults that take a learner away, in order."""
  scheduled = [fault for fault in options.schedule if fault.kind != 'join']
  for fault in scheduled:
    if fault.kind == 'leave' or math.isinf(fault.seconds):
      raise ValueError(
        f'{fault}: data parallelism cannot go on without a learner; give the '
        'fault a finite time.'
      )
  return heapq.merge(
    sorted(scheduled, key=_time_of),
    *(random_faults(options, m, seed) for m in range(M)),
    key=_time_of,
  )


def _time_of(fault: Fault) -> float:
  return fault.at


def _joined(setup: VirtualSetup, first: int, count: int) -> Any:
  """Batches of all learners together, [count, batch, ...]."""
  parts = [learner.batches(first, count) for learner in setup.learners]
  return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)


def _first(batches: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf[0], batches)


def _reason_to_end(
  setup: VirtualSetup, now: float, rounds: int, tokens: int
) -> str | None:
  budget = setup.syncer.budget
  if budget.rounds and rounds >= budget.rounds:
    return f'{budget.rounds} rounds'
  if budget.merged_tokens and tokens >= budget.merged_tokens:
    return f'{budget.merged_tokens:,} merged tokens'
  if now >= setup.max_seconds:
    return f'{setup.max_seconds:g} virtual seconds'
  return None
