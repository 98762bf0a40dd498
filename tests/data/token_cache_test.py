import threading

import numpy as np
import pytest

from decoupled_diloco.data import token_cache

DTYPE = np.dtype('<u2')


def _build(train, held_out):
  train.write(np.arange(5, dtype=DTYPE).tobytes())
  held_out.write(np.arange(5, 7, dtype=DTYPE).tobytes())
  return {'digest': 'd'}


def _open(folder, build=_build):
  return token_cache.open_or_build(str(folder), 'key', DTYPE, build)


def _must_not_build(train, held_out):
  raise AssertionError('the entry is there')


def test_built_once_then_mapped(tmp_path):
  for build in (_build, _must_not_build):
    entry = _open(tmp_path / 'a' / 'b', build)
    assert entry.train.tolist() == [0, 1, 2, 3, 4]
    assert entry.held_out.tolist() == [5, 6]
    assert entry.summary == {'digest': 'd'}
    assert not entry.train.flags.writeable


def test_empty_part(tmp_path):
  entry = _open(tmp_path, lambda train, held_out: {})
  assert entry.train.size == entry.held_out.size == 0
  assert entry.train.dtype == DTYPE


def test_builders_at_the_same_time_share_one_entry(tmp_path):
  # All are inside `build` before any of them can rename.
  barrier = threading.Barrier(4, timeout=60)
  entries, errors = [], []

  def build(train, held_out):
    barrier.wait()
    return _build(train, held_out)

  def work():
    try:
      entries.append(_open(tmp_path, build))
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not errors
  assert [entry.train.tolist() for entry in entries] == [[0, 1, 2, 3, 4]] * 4
  assert [path.name for path in tmp_path.iterdir()] == ['key']


def test_an_interrupted_build_leaves_nothing(tmp_path):
  def interrupted(train, held_out):
    train.write(b'half')
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    _open(tmp_path, interrupted)
  assert not list(tmp_path.iterdir())
  assert _open(tmp_path).train.size == 5


@pytest.mark.parametrize('part', ['train', 'held_out', 'summary.json'])
def test_damage_is_explained(tmp_path, part):
  _open(tmp_path)
  path = tmp_path / 'key' / part
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(ValueError, match=r'is damaged .*; delete this folder'):
    _open(tmp_path)


def test_unusable_folder_and_full_disk_are_explained(tmp_path):
  (tmp_path / 'file').write_text('not a folder')
  with pytest.raises(ValueError, match='must be a writable local folder'):
    _open(tmp_path / 'file')

  def no_space(train, held_out):
    raise OSError(28, 'No space left on device')

  with pytest.raises(ValueError, match=r'No space left on device.*; make room'):
    _open(tmp_path / 'full', no_space)
