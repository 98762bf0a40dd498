"""Failures: when they strike a simulated cluster, and what they do."""

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from decoupled_diloco.simulate.options import FailureOptions, Fault

if TYPE_CHECKING:
  from decoupled_diloco.simulate.engine import Engine


def plan(engine: 'Engine', options: FailureOptions, seed: int) -> None:
  """Lets the failures of the options happen to a cluster.

  Those of a schedule strike when it says so; the random ones go on until the
  run has ended.
  """
  for fault in options.schedule:
    if fault.kind != 'join':
      engine.at(fault.at, lambda fault=fault: strike(engine, fault))
  for m in range(len(engine.learners)):
    _plan_next(engine, random_faults(options, m, seed))


def random_faults(
  options: FailureOptions, learner: int, seed: int
) -> Iterator[Fault]:
  """The random failures of one learner, one after the other, without end."""
  if not options.mean_seconds_between:
    return
  dice = random.Random(f'{seed} failures {learner}')
  at = options.joins_at(learner)
  while True:
    at += options.mean_seconds_between * dice.expovariate(1.0)
    seconds = options.mean_repair_seconds * dice.expovariate(1.0)
    yield Fault(at, learner, 'kill', seconds)
    at += seconds


def _plan_next(engine: 'Engine', faults: Iterator[Fault]) -> None:
  fault = next(faults, None)
  if fault is None:
    return

  def happen() -> None:
    if engine.end is None:
      strike(engine, fault)
      _plan_next(engine, faults)

  engine.at(fault.at, happen)


def strike(engine: 'Engine', fault: Fault) -> None:
  """Does what a fault says, unless it is done already."""
  m, back_at = fault.learner, engine.now + fault.seconds
  if fault.kind == 'syncer':
    if engine.syncer.is_alive and engine.end is None:
      engine.kill_syncer()
      engine.at(back_at, engine.start_syncer)
    return
  if engine.is_away(m):
    return
  match fault.kind:
    case 'kill':
      engine.kill(m)
      engine.at(back_at, lambda: engine.start(m))
    case 'partition' | 'silent':
      engine.partition(m, is_noticed=fault.kind == 'partition')
      engine.at(back_at, lambda: engine.heal(m))
    case 'leave':
      engine.learners[m].leave('it leaves')
    case _:
      raise AssertionError(f'{fault} strikes nobody.')
