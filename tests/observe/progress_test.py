"""The live view: when it says what, and where."""

import io

import pytest

from decoupled_diloco.observe.progress import ProgressOptions, ProgressView
from decoupled_diloco.observe.status import init, update


def _watch(stream, header, steps, **options):
  view = ProgressView(stream, ProgressOptions(**options))
  status = init(header)
  for event, effects in steps:
    update(status, event, effects)
    # A clock of its own, with another beginning.
    view.update(status, 1000.0 + event.now)
  view.close()
  view.close()


def test_lines_for_a_log_file(hand_made):
  stream = io.StringIO()
  _watch(stream, *hand_made, line_seconds=5.0, window_seconds=10.0)
  # The figures are worked out in status_test and goodput_test. A line is due
  # at 0, 5, 10 and 15, and at the end; what happens is said at once.
  assert stream.getvalue().splitlines() == [
    '[0:00:00] Learner 0 has joined.',
    '[0:00:00] gathering: 1 of 2 learners connected, 0 ready',
    '[0:00:01] Learner 1 has joined.',
    '[0:00:03] Round 0 is open: training begins with 2 of 2 learners.',
    # Useful 20 of (10 + 10) x 2; nothing merged of 20 processed.
    '[0:00:05] round 0/100  0.0/s  loss 2.500  goodput 50.0 %  yield 0.0 %  '
    'learners 2/2',
    '[0:00:10] Learner 1 is lost: reset.',
    # Useful 50 of 15 x 7; merged 15 of 65. One round in 10 s, 99 are left.
    '[0:00:10] round 1/100  0.1/s  loss 2.500  goodput 47.6 %  yield 23.1 %  '
    'learners 1/2  left 0:16:30',
    '[0:00:13] Learner 1 is back after 4.0 s, as a new process.',
    # Useful 50 of 15 x 12; merged 35 of 40 + 30. Two rounds since 5.
    '[0:00:15] Draining: by hand.',
    '[0:00:15] draining  round 1/100  0.2/s  loss 2.500  goodput 27.8 %  '
    'yield 50.0 %  learners 2/2',
    '[0:00:17] Finished: by hand.',
    '[0:00:17] finished  round 1/100  0.2/s  loss 2.500  goodput 27.8 %  '
    'yield 50.0 %  learners 2/2',
  ]


def test_lines_are_short_and_plain(tiny_run):
  faults = ((5.0, 1, 4.0, True),)
  run = tiny_run(scan_seconds=(1.0, 1.1), rounds=30, faults=faults)
  header, steps = run.header, run.steps
  stream = io.StringIO()
  _watch(stream, header, steps, line_seconds=1.0)
  lines = stream.getvalue().splitlines()
  assert len(lines) > 30
  for line in lines:
    assert line.isprintable() and len(line) <= 100


def test_a_long_notice_is_folded(hand_made):
  stream = io.StringIO()
  header, _ = hand_made
  status = init(header)
  status.tell('notice', 'Rounds wait: ' + 'learner 7 was last seen; ' * 20)
  ProgressView(stream).update(status, 0.0)
  lines = stream.getvalue().splitlines()
  assert all(len(line) <= 100 for line in lines)
  assert lines[1].startswith(' ' * len('[0:00:00] ') + 'learner')


def test_it_is_throttled(hand_made):
  header, _ = hand_made
  stream = io.StringIO()
  view = ProgressView(stream, ProgressOptions(line_seconds=10.0))
  status = init(header)
  for now in (0.0, 0.1, 9.9, 10.0, 19.9):
    view.update(status, now)
  assert len(stream.getvalue().splitlines()) == 2
  view.close()
  view.update(status, 100.0)
  assert len(stream.getvalue().splitlines()) == 3


def test_silence_is_time_too(hand_made):
  header, steps = hand_made
  stream = io.StringIO()
  view = ProgressView(stream, ProgressOptions(line_seconds=10.0))
  status = init(header)
  for event, effects in steps[:5]:
    update(status, event, effects)
  # The last event is at 4; 30 s later nothing more has come.
  view.update(status, 500.0)
  view.update(status, 530.0)
  assert stream.getvalue().splitlines()[-1].startswith('[0:00:34] round 0')


def test_a_terminal_gets_a_picture(hand_made, monkeypatch):
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '100')
  monkeypatch.setenv('LINES', '30')
  monkeypatch.delenv('NO_COLOR', raising=False)
  stream = Terminal()
  _watch(stream, *hand_made, live_seconds=5.0)
  text = stream.getvalue()
  # Drawn at 0, 5, 10, 15 and at the end, each over the one before.
  assert text.count('participation') >= 5
  assert '\x1b[1A' in text
  # The cursor is hidden while it is drawn, and given back.
  assert text.rindex('\x1b[?25h') > text.rindex('\x1b[?25l')
  monkeypatch.setenv('TERM', 'dumb')
  dumb = Terminal()
  _watch(dumb, *hand_made)
  assert '\x1b' not in dumb.getvalue()


@pytest.mark.parametrize(
  ('options', 'rule'),
  [
    ({'style': 'blinking'}, "must be 'auto', 'live' or 'lines'"),
    ({'live_seconds': 0.0}, 'live_seconds=0.0 must be positive'),
    ({'max_happenings': -1}, 'must not be negative'),
  ],
)
def test_options_are_checked(options, rule):
  with pytest.raises(ValueError, match=rule):
    ProgressOptions(**options)
