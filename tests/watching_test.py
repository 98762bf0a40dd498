"""A run that is watched, and summed up."""

import json

import pytest

from decoupled_diloco import watching
from decoupled_diloco.observe.tape import TapeHeader, TapeWriter
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.effects import Broadcast, Finish
from decoupled_diloco.run_folder import RunFolder
from decoupled_diloco.run_result import Result

OPTIONS = {
  'run_id': 'r',
  'schedule': {'sync_every': 4, 'num_fragments': 2},
  'membership': {'num_learners': 2},
  'quorum': {'min_learners': 1},
  'budget': {'rounds': 10, 'merged_tokens': 0},
}
RESULT = Result(
  reason='10 rounds',
  has_met_budget=True,
  is_finite=True,
  checkpoint='/c',
  loss_start=6.0,
  loss_end=2.0,
  sample='To be',
)


@pytest.fixture
def folder(tmp_path):
  """Of a run that has not begun."""
  return RunFolder(str(tmp_path))


@pytest.fixture
def tape(folder):
  """What the syncer writes."""
  writer = TapeWriter(folder.tape, TapeHeader('syncer', OPTIONS, (3, 4)))
  yield writer
  writer.close()


def _opens(tape, now: float, round_: int) -> None:
  opened = Broadcast(msg.RoundOpened(round_, round_ % 2))
  tape.record(ev.TimePassed(now), (opened,))


def test_a_run_is_followed(folder, tape, capsys):
  watcher = watching.Watcher(folder)
  watcher.poll()
  assert watcher.progress == 0.0 and not watcher.has_begun
  _opens(tape, 1.0, 4)
  watcher.poll()
  # Round 4 of 10.
  assert watcher.progress == 0.4 and watcher.has_begun
  watcher.tell('Something else.')
  watcher.close()
  assert 'Something else.\n' in capsys.readouterr().err
  lines = folder.metrics.read_text().splitlines()
  assert json.loads(lines[-1])['round'] == 4


def test_a_budget_of_tokens_counts_too(folder, tape):
  watcher = watching.Watcher(folder)
  _opens(tape, 1.0, 1)
  watcher.poll()
  assert watcher.status is not None
  watcher.status.budget_tokens, watcher.status.merged_tokens = 100, 50.0
  assert watcher.progress == 0.5
  watcher.close()


def test_metrics_that_cannot_be_written_end_no_run(
  folder, tape, capsys, monkeypatch
):
  def full(self, status):
    raise OSError(28, 'No space left on device', '/x')

  monkeypatch.setattr('decoupled_diloco.watching.MetricsWriter.write', full)
  watcher = watching.Watcher(folder)
  _opens(tape, 1.0, 0)
  watcher.poll()
  watcher.close()
  said = capsys.readouterr().err
  assert said.count('No more metrics are written: No space left') == 1


def test_a_thread_can_watch(folder, tape):
  with watching.watching(folder) as watcher:
    _opens(tape, 1.0, 7)
  assert watcher.progress == 0.7


def _summary(folder, result, capsys) -> str:
  watcher = watching.Watcher(folder)
  watcher.poll()
  watcher.close()
  watching.show_summary(watcher, result)
  return capsys.readouterr().out


def test_the_summary_of_a_run(folder, tape, capsys):
  _opens(tape, 1.0, 0)
  tape.record(ev.TimePassed(2.0), (Finish('10 rounds'),))
  shown = _summary(folder, RESULT, capsys)
  for words in ('complete (10 rounds)', '6.0000 -> 2.0000', 'To be', '/c'):
    assert words in shown
  assert json.loads(folder.summary.read_text())['is_complete']


def test_the_summary_of_a_run_that_was_broken_off(folder, tape, capsys):
  _opens(tape, 1.0, 0)
  shown = _summary(folder, None, capsys)
  assert 'Run r: not complete' in shown
  assert 'held-out loss' not in shown


def test_a_summary_that_cannot_be_kept_is_still_shown(
  folder, tape, capsys, monkeypatch
):
  _opens(tape, 1.0, 0)

  def full(path, text):
    raise OSError('summary.json cannot be written.')

  monkeypatch.setattr('decoupled_diloco.watching.write_whole', full)
  watcher = watching.Watcher(folder)
  watcher.close()
  watching.show_summary(watcher, RESULT)
  shown = capsys.readouterr()
  assert 'goodput' in shown.out
  assert 'is not kept: summary.json cannot be written.' in shown.err


def test_nothing_is_said_of_nothing(folder, capsys):
  assert _summary(folder, RESULT, capsys) == ''


def test_of_a_continued_run_only_the_news_is_shown(folder, tape, capsys):
  _opens(tape, 1.0, 4)
  watcher = watching.Watcher(folder)
  watcher.poll()
  assert not watcher.has_begun
  again = TapeWriter(folder.tape, TapeHeader('syncer', OPTIONS, (3, 4)))
  again.record(ev.Restarted(9.0, 2, None), ())
  again.close()
  watcher.poll()
  watcher.close()
  assert watcher.has_begun
  said = capsys.readouterr().err
  assert 'The syncer is back after 8.0 s' in said
  assert 'Round 4 is open' not in said
