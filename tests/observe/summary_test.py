"""What a run came to."""

import json
import math

import pytest

from decoupled_diloco.observe.status import init, update
from decoupled_diloco.observe.summary import OutsideFacts, summarise
from decoupled_diloco.observe.summary_text import to_text

FACTS = OutsideFacts(
  held_out_loss_start=5.5452,
  held_out_loss_end=2.3711,
  checkpoint='/runs/a/checkpoints/2',
  tape='/runs/a/events.jsonl',
  metrics='/runs/a/metrics.jsonl',
  sample='ROMEO:\nWhat [light]\x1b?',
)


def _status(header, steps, until=float('inf')):
  status = init(header)
  for event, effects in steps:
    if event.now <= until:
      update(status, event, effects)
  return status


def test_the_text_at_80_columns(hand_made):
  # The figures are worked out in status_test and goodput_test; at the end,
  # useful are 50 of 15 x 12 tokens, merged 35 of 70. Up came 125 bytes and a
  # refused payload of 50.
  assert to_text(summarise(_status(*hand_made), FACTS)).splitlines() == [
    'Run by-hand: complete (by hand)',
    '',
    'held-out loss    5.5452 -> 2.3711 nats per token, global model',
    'goodput          27.8 %  50 useful of 180 tokens of capacity',
    'yield            50.0 %  35 merged of 70 processed tokens',
    'rounds           2 merged; quorum 1.0 s, grace 500 ms (medians)',
    'wall time        12.0 s; start-up 3.0 s, drain 2.0 s',
    'bits/parameter   4.00 up, 16.00 down, per synchronisation',
    'traffic          175 B up, 2.3 kB down, all learners together',
    'faults survived  1',
    '                 learner 1 away 4.0 s (reset; new process)',
    'refusals         1 stale',
    '',
    # With two blanks between columns it would take 82.
    'learner steps tokens/s participation since return staleness weight '
    'refusals',
    '─' * 75,
    '      0     2       10       100.0 %            -      0.00 87.5 % '
    '       0',
    '      1     2        5        50.0 %            -      0.00 12.5 % '
    '       1',
    '',
    'checkpoint  /runs/a/checkpoints/2',
    'tape        /runs/a/events.jsonl',
    'metrics     /runs/a/metrics.jsonl',
    '',
    'sample of the global model',
    'ROMEO:',
    'What [light] ?',
  ]


def test_after_a_return(tiny_run):
  # Learner 1 is away from 10 to 14 of some 31 s.
  run = tiny_run(rounds=30, faults=((10.0, 1, 4.0, True),))
  summary = summarise(_status(run.header, run.steps))
  zero, one = summary.learners
  assert zero.participation == 1.0 and zero.participation_since_return is None
  assert one.participation is not None and one.participation < 0.9
  assert one.participation_since_return is not None
  assert one.participation < one.participation_since_return
  text = to_text(summary)
  assert 'learner 1 away' in text
  assert 'sample' not in text and 'checkpoint' not in text


def test_a_run_that_was_broken_off_or_has_failed(hand_made):
  summary = summarise(
    _status(*hand_made, until=13.0), OutsideFacts(end_reason='the disk is full')
  )
  assert not summary.is_complete
  title = to_text(summary).splitlines()[0]
  assert title == 'Run by-hand: not complete (the disk is full)'
  failed = summarise(_status(*hand_made), OutsideFacts(is_failure=True))
  assert not failed.is_complete


def test_who_is_absent_at_the_end(tiny_run):
  # Learner 1 of 3 is gone for good after 10 s, learner 2 never comes: it is
  # killed at once, before its hello has arrived.
  faults = ((10.0, 1, 1e9, True), (0.0, 2, 1e9, True))
  run = tiny_run(scan_seconds=(1.0,) * 3, rounds=10, faults=faults)
  text = to_text(summarise(_status(run.header, run.steps)))
  assert 'faults survived  0\n' in text
  assert 'absent           learner 1 (killed)\n' in text
  assert '                 learner 2 (never came)\n' in text


def test_a_run_in_which_nothing_happened(hand_made):
  text = to_text(summarise(init(hand_made[0])))
  assert 'goodput          -  0 useful of - tokens' in text
  assert 'held-out loss' not in text


@pytest.mark.parametrize('width', [60, 80, 120])
def test_it_fits_and_paths_can_be_copied(hand_made, width):
  path = '/a/' + 'long/' * 30 + 'path'
  summary = summarise(_status(*hand_made), OutsideFacts(checkpoint=path))
  lines = to_text(summary, width).splitlines()
  assert all(len(line) <= width for line in lines)
  assert path in ''.join(lines)


def test_it_is_json(hand_made):
  facts = OutsideFacts(held_out_loss_end=math.inf)
  value = summarise(_status(*hand_made), facts).to_jsonable()
  text = json.dumps(value, allow_nan=False)
  assert json.loads(text) == value
  assert value['yield'] == 0.5 and value['goodput'] == 50 / 180
  assert value['facts']['held_out_loss_end'] is None
  assert value['learners'][1]['refusals'] == {'stale': 1}
  assert value['faults'][0]['seconds_away'] == 4.0
