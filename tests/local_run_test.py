"""What the processes of a local run are told, and tell."""

import dataclasses
import io
import json
import sys

import pytest

from decoupled_diloco import configuring, local_run
from decoupled_diloco.run_folder import RunFolder
from decoupled_diloco.run_result import Result
from decoupled_diloco.runtime.launch_options import EXIT_USAGE, LaunchError

RESULT = Result(reason='10 rounds', has_met_budget=True, is_finite=True)


@pytest.fixture
def options(tmp_path):
  """Of a run of three learners."""
  config = configuring.default_config()
  config.budget.rounds = 100
  config.membership.num_learners = 3
  config.workdir = str(tmp_path / 'run')
  return configuring.options_of(config)


@pytest.fixture
def launched(monkeypatch):
  """A launcher that starts nothing, and does what the test says."""

  class Launcher:
    def __init__(self, options, *, hear, tell, **others):
      self.hear, self.tell = hear, tell

    def run(self, on_poll, poll_seconds):
      assert poll_seconds > 0
      on_poll()
      launched.does(self)

    def request_stop(self, number):
      raise AssertionError('nobody has asked for it')

  class Launched:
    does = staticmethod(lambda launcher: None)

  launched = Launched()
  monkeypatch.setattr(local_run, 'Launcher', Launcher)
  # Handlers would stay after the test.
  monkeypatch.setattr(local_run.stopping, 'in_order', lambda *functions: None)
  return launched


def _reported(result: Result) -> str:
  return json.dumps({'result': dataclasses.asdict(result)})


def test_command_lines(tmp_path):
  folder = RunFolder(str(tmp_path))
  given = ['--config=x.py', '--config.role=local']
  line = local_run.command(given, folder, 'learner', 2, 'host:1')
  assert line == [
    sys.executable,
    '-m',
    'decoupled_diloco.train',
    *given,
    # Later ones win.
    '--config.role=learner',
    f'--config.workdir={folder.root}',
    '--config.learner=2',
    '--config.syncer.address=host:1',
    '--launched',
  ]
  assert not any('resume' in word for word in line)
  line = local_run.command(given, folder, 'learner', 2, 'host:1', is_again=True)
  assert '--config.resume=True' in line
  line = local_run.command(given, folder, 'syncer', -1, '')
  assert not any('learner=' in word or 'address' in word for word in line)


def test_what_is_reported_is_heard(options, launched, capsys):
  stream = io.StringIO()
  reporter = local_run.Reporter(stream)
  reporter.tell('Saving.\nNow.')
  reporter.result(RESULT)
  reporter.error('error: full')
  told, result, error = stream.getvalue().splitlines()
  assert error == 'error: full'

  def report(launcher):
    launcher.hear(told)
    assert local.result is None
    launcher.hear(result)

  launched.does = report
  local = local_run.LocalRun(options, lambda *_: [])
  local.run()
  assert local.result == RESULT and local.failure is None
  assert 'Saving.\nNow.' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('result', 'code'),
  [
    (RESULT, 0),
    (dataclasses.replace(RESULT, has_met_budget=False), 1),
    (dataclasses.replace(RESULT, is_finite=False), 1),
    (dataclasses.replace(RESULT, stopped_by=2, has_met_budget=False), 130),
    # The sample was not waited for.
    (dataclasses.replace(RESULT, stopped_by=15), 143),
  ],
)
def test_the_code_says_how_it_ended(options, launched, capsys, result, code):
  launched.does = lambda launcher: launcher.hear(_reported(result))
  assert local_run.run(options, []) == code
  assert 'Setting up the syncer' in capsys.readouterr().err


def test_what_failed_at_the_end_is_said_last(options, launched, capsys):
  failed = dataclasses.replace(RESULT, failure='The disk is full.')
  launched.does = lambda launcher: launcher.hear(_reported(failed))
  with pytest.raises(SystemExit) as caught:
    local_run.run(options, [])
  assert caught.value.code == 1
  assert capsys.readouterr().err.endswith('error: The disk is full.\n')


def test_a_run_that_cannot_begin_leaves_its_folder(options, launched, capsys):
  def fail(launcher):
    raise LaunchError('a bad port', EXIT_USAGE)

  launched.does = fail
  for _ in range(2):
    with pytest.raises(SystemExit) as caught:
      local_run.run(options, [])
    assert caught.value.code == EXIT_USAGE
    assert capsys.readouterr().err.endswith('error: a bad port\n')


def test_a_folder_that_is_taken(options, launched, capsys):
  RunFolder(options.workdir).claim()
  with pytest.raises(SystemExit) as caught:
    local_run.run(options, [])
  assert caught.value.code == EXIT_USAGE
  assert 'choose another folder' in capsys.readouterr().err
