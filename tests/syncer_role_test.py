"""A syncer put together; and what it leaves when it ends."""

import dataclasses
import json
import os
import pathlib
import signal

import pytest

from decoupled_diloco import stopping, syncer_role
from decoupled_diloco.observe.tape import read_tape
from decoupled_diloco.run_folder import RunFolder
from decoupled_diloco.run_result import Result
from decoupled_diloco.storage import snapshots
from tests.tiny_run import tiny_options


@pytest.fixture
def options(tmp_path):
  """Of a tiny run."""
  return tiny_options(tmp_path)


@pytest.fixture
def run(options):
  """Serves a run that is stopped by SIGTERM at once; gives what was told."""
  handlers = {number: signal.getsignal(number) for number in stopping.SIGNALS}

  def serve() -> tuple[Result, list[str]]:
    setup = syncer_role.set_up_syncer(options)
    serve_once = setup.server.serve_once
    is_asked = []

    def ask_first(*, block: bool) -> bool:
      if not is_asked:
        is_asked.append(True)
        os.kill(os.getpid(), signal.SIGTERM)
      return serve_once(block=block)

    setup.server.serve_once = ask_first
    told = []
    return syncer_role.run_syncer(setup, told.append), told

  yield serve
  for number, handler in handlers.items():
    signal.signal(number, handler)


def test_what_a_stopped_run_leaves(options, run):
  result, told = run()
  folder = RunFolder(options.workdir)
  assert result.reason == 'stopped by SIGTERM'
  assert not result.is_success and result.exit_code == 128 + signal.SIGTERM
  # Whoever has stopped it does not want to wait for more.
  assert told == ['Saving the checkpoint.']
  assert result.loss_end is None and result.sample == ''
  assert result.checkpoint == str(folder.checkpoint)
  assert (
    json.loads(folder.result.read_text())['checkpoint'] == result.checkpoint
  )
  tape = read_tape(folder.tape)
  assert tape.segments[0].header.machine == 'syncer'
  assert folder.address.exists()


def test_the_token_is_written_nowhere(options, run):
  object.__setattr__(options.security, 'run_token', 'very-secret')
  run()
  paths = [
    path for path in pathlib.Path(options.workdir).rglob('*') if path.is_file()
  ]
  assert len(paths) > 5
  assert not any(b'very-secret' in path.read_bytes() for path in paths)


def test_a_checkpoint_that_cannot_be_saved(options, run, monkeypatch):
  save = snapshots.save

  def full(folder, *args):
    if not folder.endswith('checkpoint'):
      return save(folder, *args)
    raise OSError('The checkpoint cannot be written (No space left).')

  monkeypatch.setattr(snapshots, 'save', full)
  result, _ = run()
  assert result.failure == 'The checkpoint cannot be written (No space left).'
  assert result.checkpoint == ''
  assert result.exit_code == 1
  assert RunFolder(options.workdir).result.exists()


def test_a_result_that_cannot_be_kept(run, monkeypatch):
  write = syncer_role.write_whole

  def full(path, text):
    if path.name == 'result.json':
      raise OSError('result.json cannot be written.')
    write(path, text)

  monkeypatch.setattr(syncer_role, 'write_whole', full)
  result, _ = run()
  assert result.failure == 'result.json cannot be written.'
  assert result.checkpoint


def test_an_address_that_is_taken(options):
  first = syncer_role.set_up_syncer(options)
  folder = RunFolder(options.workdir)
  taken = folder.address.read_text()
  other = dataclasses.replace(
    options,
    workdir=f'{options.workdir}-2',
    syncer=dataclasses.replace(options.syncer, address=taken),
  )
  with pytest.raises(OSError, match='must be free'):
    syncer_role.set_up_syncer(other)
  # Its folder is fit for another attempt.
  RunFolder(other.workdir).unclaim()
  RunFolder(other.workdir).claim()
  first.server.close(1.0)
  first.executor.shutdown()
  first.saver.shutdown()
  first.tape.close()
