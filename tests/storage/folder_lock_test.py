"""One process at a time; of two holders in one process, one alone as well."""

import pytest

from decoupled_diloco.storage.folder_lock import FolderLock


def test_a_folder_has_one_holder(tmp_path):
  folder = tmp_path / 'not' / 'there'
  first, second = FolderLock(folder), FolderLock(folder)
  first.acquire()
  for _ in range(2):
    with pytest.raises(BlockingIOError):
      second.acquire()
  first.release()
  first.release()
  second.acquire()
  second.release()


def test_a_folder_that_cannot_be(tmp_path):
  (tmp_path / 'file').write_text('in the way')
  with pytest.raises(OSError, match='Not a directory'):
    FolderLock(tmp_path / 'file' / 'folder').acquire()
