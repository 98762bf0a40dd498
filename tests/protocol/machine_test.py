"""Tapes: what was decided once is decided again."""

import random

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol.learner import learner_machine
from decoupled_diloco.protocol.machine import replay, run
from decoupled_diloco.protocol.records import from_json, to_json
from decoupled_diloco.protocol.syncer import syncer_machine
from tests.protocol.cluster import Cluster, syncer_options

OPTIONS = syncer_options(M=3, k_min=2, rounds=12)


def _cluster() -> Cluster:
  """Three learners on three clocks; one is cut off for a while, one killed."""
  normal = random.Random(0)
  scans = [
    lambda seconds=seconds: seconds * normal.gauss(1.0, 0.1)
    for seconds in (1.0, 1.2, 1.9)
  ]
  cluster = Cluster(OPTIONS, scans, latency=0.1, merge_seconds=0.05)
  cluster.at(3.0, lambda: cluster.partition(1))
  cluster.at(4.0, lambda: cluster.heal(1))
  cluster.at(6.0, lambda: cluster.kill(2))
  cluster.at(9.0, lambda: cluster.start(2))
  return cluster.run()


def test_a_run_is_determined_by_its_events():
  first, second = _cluster(), _cluster()
  assert first.end is not None
  assert first.tape == second.tape
  assert first.syncer_state == second.syncer_state


def test_a_tape_replays():
  tape = _cluster().tape
  assert replay(syncer_machine(OPTIONS), tape) == len(tape) > 100
  replayed = list(run(syncer_machine(OPTIONS), [event for event, _ in tape]))
  assert replayed == tape


def test_a_learners_tape_replays():
  cluster = _cluster()
  for learner, tape in zip(
    cluster.learners, cluster.learner_tapes, strict=True
  ):
    assert replay(learner_machine(learner.options), tape) == len(tape) > 20


def test_a_tape_replays_after_it_was_written_down():
  tape = _cluster().tape
  lines = [
    (to_json(event), [to_json(effect) for effect in effects])
    for event, effects in tape
  ]
  read = [
    (from_json(event), tuple(from_json(effect) for effect in effects))
    for event, effects in lines
  ]
  assert read == tape
  assert replay(syncer_machine(OPTIONS), read) == len(tape)  # pyright: ignore[reportArgumentType]


def _index(tape, kind):
  return next(
    i
    for i, (_, effects) in enumerate(tape)
    if any(isinstance(effect, kind) for effect in effects)
  )


def test_a_changed_effect_is_found():
  tape = _cluster().tape
  i = _index(tape, fx.Merge)
  event, effects = tape[i]
  tape[i] = (event, effects[:-1])
  with pytest.raises(ValueError, match=rf'event {i} of the tape, .*replayed'):
    replay(syncer_machine(OPTIONS), tape)


def test_a_missing_event_is_found():
  tape = _cluster().tape
  del tape[_index(tape, fx.Accept)]
  with pytest.raises(ValueError, match='of the tape'):
    replay(syncer_machine(OPTIONS), tape)


def test_a_tape_belongs_to_its_options():
  tape = _cluster().tape
  with pytest.raises(ValueError, match='of the tape'):
    replay(syncer_machine(syncer_options(M=3, k_min=3, rounds=12)), tape)


def test_a_step_leaves_the_state_before_as_it_was():
  # Pure: the same event on the same state, twice, has the same outcome.
  machine = syncer_machine(OPTIONS)
  state = machine.init()
  for event, effects in _cluster().tape:
    after = machine.step(state, event)
    assert machine.step(state, event) == after
    assert after[1] == effects
    state = after[0]
  assert isinstance(state.began_at, float)
  assert machine.init() == machine.init()
  assert not isinstance(state, ev.Event)
