"""An audit finds nothing in a good tape, and what is wrong in a bad one."""

import dataclasses

import pytest

from decoupled_diloco.auditing import audit
from decoupled_diloco.observe.tape import Segment, Tape, TapeHeader
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from tests.protocol.cluster import Cluster, syncer_options


@pytest.fixture(scope='module')
def tape():
  """Of a run whose learners and syncer are killed in the middle."""
  options = syncer_options(rounds=60)
  cluster = Cluster(options, [lambda: 1.0, lambda: 1.3], keeps_progress=True)
  cluster.at(10.0, lambda: cluster.kill(1))
  cluster.at(14.0, lambda: cluster.start(1))
  cluster.at(20.0, cluster.kill_syncer)
  cluster.at(23.0, cluster.start_syncer)
  cluster.run()
  header = TapeHeader.of(
    'syncer', options, [1] * options.schedule.num_fragments
  )
  [second] = [
    number
    for number, (event, _) in enumerate(cluster.tape)
    if isinstance(event, ev.Restarted)
  ]
  steps = tuple(cluster.tape)
  parts = (steps[:second], steps[second:])
  return Tape(tuple(Segment(header, part) for part in parts), None)


def changed(tape, change):
  """With every step of the second life changed, or left out for None."""
  first, second = tape.segments
  steps = tuple(
    step for old in second.steps if (step := change(*old)) is not None
  )
  return tape._replace(segments=(first, second._replace(steps=steps)))


def test_a_good_tape(tape):
  found = audit(tape)
  assert found.problems == ()
  assert found.num_lives == 2
  assert found.num_events == len(tape.steps)
  published = [
    effect
    for _, effects in tape.steps
    for effect in effects
    if isinstance(effect, fx.Publish)
  ]
  # One may have become durable just before the syncer was killed.
  assert 0 <= found.num_merges - len(published) <= 1


def test_a_decision_that_was_another(tape):
  def without_publications(event, effects):
    kept = tuple(e for e in effects if not isinstance(e, fx.Publish))
    return event, kept

  problems = audit(changed(tape, without_publications)).problems
  assert problems[0].startswith('The tape does not replay: ')


def test_a_merge_that_is_missing_after_a_restart(tape):
  def forget(event, effects):
    if isinstance(event, ev.Restarted) and event.state is not None:
      state = event.state._replace(
        versions=tuple(v - 1 for v in event.state.versions)
      )
      event = dataclasses.replace(event, state=state)
    return event, effects

  problems = audit(changed(tape, forget)).problems
  assert any('begins with version' in text for text in problems)


def test_a_version_that_is_left_out(tape):
  def leap(event, effects):
    return event, tuple(
      dataclasses.replace(e, version=e.version + 1)
      if isinstance(e, fx.Publish)
      else e
      for e in effects
    )

  problems = audit(changed(tape, leap)).problems
  assert any('has version' in text for text in problems)


def test_tokens_that_are_merged_twice(tape):
  def repeat(event, effects):
    if isinstance(event, ev.MessageArrived) and isinstance(
      event.message, msg.Contribution
    ):
      more = event.message.tokens + 1
      message = dataclasses.replace(event.message, tokens=more)
      event = dataclasses.replace(event, message=message)
    return event, effects

  problems = audit(changed(tape, repeat)).problems
  assert any('merges tokens of learner' in text for text in problems)


def test_a_tape_of_a_learner(tape):
  header = dataclasses.replace(tape.segments[0].header, machine='learner')
  other = Tape((tape.segments[0]._replace(header=header),), None)
  with pytest.raises(ValueError, match='only the tape of a syncer'):
    audit(other)
