"""Whose the folder of a run is."""

import pytest

from decoupled_diloco.run_folder import RunFolder, write_whole


@pytest.fixture
def folder(tmp_path):
  """A folder that is not there yet."""
  return RunFolder(str(tmp_path / 'runs' / 'one'))


def test_one_run_has_it(folder):
  folder.claim()
  with pytest.raises(ValueError, match=r'belongs to a run that is starting'):
    folder.claim()


@pytest.mark.parametrize('name', ['tape', 'checkpoint'])
def test_a_folder_with_a_run_in_it(folder, name):
  path = getattr(folder, name)
  path.parent.mkdir(parents=True)
  path.touch()
  with pytest.raises(ValueError, match=r'holds a .*; choose another folder'):
    folder.claim()


def test_what_has_not_begun_can_be_tried_again(folder):
  folder.claim()
  folder.unclaim()
  folder.claim()
  # A header alone is no run: the process ended before it had an event.
  folder.tape.write_text('{"type":"TapeHeader"} \n')
  folder.unclaim()
  folder.claim()
  folder.tape.write_text('{"type":"TapeHeader"} \n{"type":"TimePassed"} \n')
  folder.unclaim()
  with pytest.raises(ValueError, match='holds a run already'):
    folder.claim()


@pytest.mark.parametrize('below', ['', 'below', 'far/below'])
def test_a_file_in_its_place(tmp_path, below):
  (tmp_path / 'file').touch()
  path = tmp_path / 'file' / below
  with pytest.raises(ValueError, match=r'file is a file\); choose another'):
    RunFolder(str(path)).claim()


def test_a_folder_that_cannot_be_made(monkeypatch, folder):
  def refuse(*args, **kwargs):
    raise PermissionError(13, 'Permission denied', '/runs')

  monkeypatch.setattr('pathlib.Path.mkdir', refuse)
  with pytest.raises(ValueError, match=r'Permission denied: /runs\); choose'):
    folder.claim()


def test_a_whole_file_or_none(tmp_path, monkeypatch):
  path = tmp_path / 'result.json'
  write_whole(path, 'one')
  assert path.read_text() == 'one'

  def full(self, text):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('pathlib.Path.write_text', full)
  with pytest.raises(OSError, match=r'result\.json cannot be written \(No sp'):
    write_whole(path, 'two')
  assert path.read_text() == 'one'
  assert [each.name for each in tmp_path.iterdir()] == ['result.json']
