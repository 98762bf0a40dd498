"""Files that only grow."""

import errno
import pathlib

import pytest

from decoupled_diloco.observe.appending import AppendedFile


def _open(path: pathlib.Path) -> AppendedFile:
  return AppendedFile(path, begins=b'{"a":', ends=b';\n')


def test_appends_whole_records_over_several_openings(tmp_path):
  path = tmp_path / 'folder' / 'file'
  for number in (b'1', b'2'):
    file = _open(path)
    file.append(b'{"a":' + number + b'};\n')
    file.close()
    file.close()
    assert file.cut_bytes == 0
  assert path.read_bytes() == b'{"a":1};\n{"a":2};\n'


@pytest.mark.parametrize('whole', [b'', b'{"a":1};\n'])
@pytest.mark.parametrize('size', [1, 3, 70_000])
def test_cuts_what_a_killed_process_left(tmp_path, whole, size):
  # 70,000 bytes is more than one block of 65,536 that is read from the end.
  path = tmp_path / 'file'
  path.write_bytes(whole + (b'{"a":' + b'7' * size)[:size])
  file = _open(path)
  assert file.cut_bytes == size
  file.append(b'{"a":2};\n')
  file.close()
  assert path.read_bytes() == whole + b'{"a":2};\n'


def test_finds_an_end_that_lies_across_two_blocks(tmp_path):
  # The blocks, counted from the end, meet between ';' and the line feed.
  path = tmp_path / 'file'
  path.write_bytes(b'{"a":1};\n' + b'x' * (65_536 - 1))
  file = _open(path)
  file.close()
  assert file.cut_bytes == 65_535


def test_leaves_another_kind_of_file_alone(tmp_path):
  path = tmp_path / 'file'
  path.write_bytes(b'thesis')
  with pytest.raises(ValueError, match=r'begins with .*move it away'):
    _open(path)
  path.write_bytes(b'{"a":1}\n')
  with pytest.raises(ValueError, match='holds lines but no whole record'):
    _open(path)
  assert path.read_bytes() == b'{"a":1}\n'


def test_a_record_that_does_not_fit_is_taken_back(tmp_path):
  path = tmp_path / 'file'
  file = _open(path)
  file.append(b'{"a":1};\n')
  raw = file._file

  class FullDisk:
    """Takes four bytes, then none."""

    left = 4

    def write(self, data):
      if not self.left:
        raise OSError(errno.ENOSPC, 'No space left on device')
      size, self.left = min(self.left, len(data)), 0
      return raw.write(data[:size])

    truncate = staticmethod(raw.truncate)
    close = staticmethod(raw.close)

  file._file = FullDisk()  # pyright: ignore[reportAttributeAccessIssue]
  with pytest.raises(OSError, match='free some space') as error:
    file.append(b'{"a":2};\n')
  assert error.value.errno == errno.ENOSPC
  file.close()
  assert path.read_bytes() == b'{"a":1};\n'
