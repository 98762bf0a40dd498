"""The figures of a run over time."""

import json
import math

import pytest

from decoupled_diloco.observe.metrics import (
  LEARNER_FIELDS,
  RUN_FIELDS,
  MetricsWriter,
  run_figures,
)
from decoupled_diloco.observe.status import init, update


def _status(header, steps, until=float('inf')):
  status = init(header)
  for event, effects in steps:
    if event.now <= until:
      update(status, event, effects)
  return status


def test_every_figure_is_documented_and_there(hand_made):
  header, _ = hand_made
  names = [*RUN_FIELDS]
  for number in range(2):
    names += [f'learner_{number}_{name}' for name in LEARNER_FIELDS]
  assert list(run_figures(init(header))) == names
  figures = run_figures(_status(*hand_made))
  assert list(figures) == [*names, 'refusals_stale']


def test_figures_by_hand(hand_made):
  # Worked out in status_test and goodput_test.
  figures = run_figures(_status(*hand_made, until=13.0))
  expected = {
    'time_seconds': 13.0,
    'elapsed_seconds': 10.0,
    'phase': 'running',
    'goodput': 50 / 150,
    'yield': 35 / 65,
    'contributors': 1,
    'bits_up': 4.0,
    'faults_survived': 1,
    'learner_0_useful_tokens': 40,
    'learner_0_silent_seconds': 5.0,
    'learner_1_state': 'joining',
    'learner_1_participation': 0.5,
    'learner_1_participation_since_return': None,
  }
  assert {name: figures[name] for name in expected} == expected


def test_a_loss_that_is_not_finite_is_null(hand_made):
  status = _status(*hand_made)
  status.learners[0].loss = math.nan
  assert run_figures(status)['learner_0_loss'] is None


def test_a_line_a_call_and_no_torn_line(hand_made, tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = MetricsWriter(path)
  for until in (5.0, 13.0):
    writer.write(_status(*hand_made, until=until))
  writer.close()
  with path.open('a') as file:
    file.write('{"time_seconds":14.0,"elap')
  writer = MetricsWriter(path)
  writer.write(_status(*hand_made))
  writer.close()
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert [line['time_seconds'] for line in lines] == [5.0, 13.0, 17.0]
  path.write_text('time,loss\n')
  with pytest.raises(ValueError, match='another kind of file'):
    MetricsWriter(path)
