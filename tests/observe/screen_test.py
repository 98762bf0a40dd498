"""The live picture, as text."""

import io

import pytest
from rich.console import Console

from decoupled_diloco.observe.rates import Rates
from decoupled_diloco.observe.screen import Screen
from decoupled_diloco.observe.status import init, update

NO_RATES = Rates()


def _text(status, width, height=24, rates=NO_RATES, max_happenings=5):
  console = Console(
    width=width, height=height, file=io.StringIO(), color_system=None
  )
  with console.capture() as capture:
    console.print(Screen(status, rates, status.now, max_happenings))
  return [line.rstrip() for line in capture.get().splitlines()]


def _status(header, steps, until=float('inf')):
  status = init(header)
  for event, effects in steps:
    if event.now <= until:
      update(status, event, effects)
  return status


def test_the_picture_at_80_columns(hand_made):
  status = _status(*hand_made, until=13.0)
  rates = Rates(0.5, 12.0, 34.0, 65.0)
  # The figures are worked out in status_test and goodput_test.
  assert _text(status, 80, rates=rates, max_happenings=2) == [
    'running  round 1 of 100  0.50 rounds/s  quorum 1.0 s  grace 500 ms',
    'goodput 33.3 %  yield 53.8 %  up 125 B (12 B/s)  down 2.3 kB (34 B/s)',
    'elapsed 10.0 s  left 1 min 05 s  merged 35 tokens  faults survived 1',
    '',
    'learner state      steps   loss tokens/s participation staleness merged '
    'refusals',
    '─' * 80,
    '      0 training       2  2.500       10       100.0 %      0.00      2 '
    '       0',
    '      1 joining        2  2.500        0        50.0 %      0.00      1 '
    '       0',
    '',
    '0:00:10 Learner 1 is lost: reset.',
    '0:00:13 Learner 1 is back after 4.0 s, as a new process.',
  ]


def test_before_the_start(hand_made):
  lines = _text(_status(*hand_made, until=2.0), 80, max_happenings=0)
  assert lines[0] == 'gathering: 2 of 2 learners connected, 1 ready'
  assert lines[-2].split()[:3] == ['1', 'joining', '0']


def test_time_goes_on_when_nothing_happens(hand_made):
  status = _status(*hand_made, until=13.0)
  console = Console(width=120, file=io.StringIO())
  with console.capture() as capture:
    console.print(Screen(status, Rates(), 23.0, 5))
  assert 'elapsed 20.0 s' in capture.get()


@pytest.mark.parametrize('width', [40, 60, 80, 120])
def test_no_figure_is_cut(hand_made, width):
  status = _status(*hand_made, until=13.0)
  status.learners[0].total_steps = 1_234_567_890
  lines = _text(status, width, rates=Rates(0.5, 12.0, 34.0, 65.0))
  table = lines.index('') + 1
  figures = '  '.join(lines[: table - 1])
  for figure in (
    *('grace 500 ms', 'goodput 33.3 %', 'yield 53.8 %', 'up 125 B (12 B/s)'),
    *('down 2.3 kB (34 B/s)', 'merged 35 tokens', 'faults survived 1'),
  ):
    assert figure in figures
  for line in lines[: table + 4]:
    assert len(line) <= width
    assert '…' not in line


def test_a_narrow_table_has_what_matters(hand_made):
  status = _status(*hand_made, until=13.0)
  # 7 + 1 + 9 + 1 + 6 + 1 + 6 take 31; participation would make it 45.
  lines = _text(status, 44)
  assert 'learner state      steps   loss' in lines
  lines = _text(status, 45)
  assert 'learner state      steps   loss participation' in lines


@pytest.mark.parametrize('width', [40, 60, 80, 120])
def test_it_fits_the_terminal(tiny_run, width):
  # 30 learners do not fit into 24 lines: those that train give way.
  run = tiny_run(scan_seconds=(1.0,) * 30, rounds=5)
  status = _status(run.header, run.steps, until=6.0)
  status.learners[20].state = 'absent'
  status.tell('notice', 'A very long notice. ' * 20)
  lines = _text(status, width)
  assert len(lines) <= 24
  assert max(map(len, lines)) <= width
  assert any(line.split()[:2] == ['20', 'absent'] for line in lines)
  shown = sum(line.split()[1:2] == ['training'] for line in lines)
  # All but the absent one.
  assert f'    and {29 - shown} training' in lines
  assert shown >= 5
  assert lines[-1].endswith('…')


def test_text_from_elsewhere_is_no_markup(hand_made):
  status = _status(*hand_made, until=13.0)
  status.tell('notice', '[bold]x[/bold] \x1b[2J')
  status.learners[0].state = '[red]'
  lines = _text(status, 120)
  assert lines[-1] == '0:00:13 [bold]x[/bold]  [2J.'
  assert any('0  [red]' in line for line in lines)
