"""Every record that was appended is found again, whatever happens."""

import errno
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.storage.disk import Disk
from decoupled_diloco.storage.journal import Journal, JournalError
from tests.storage import journal_oracle
from tests.storage.crashing_disk import Crashed, CrashingDisk

OWNER = 7
# Of different lengths, one of them without content.
PAYLOADS = [bytes([i]) * (3 * i) for i in range(6)]


@pytest.fixture
def folder(tmp_path):
  """Of a journal that is not there yet."""
  return str(tmp_path / 'journal')


def fill(folder, payloads=PAYLOADS):
  journal = Journal(folder, OWNER)
  for payload in payloads:
    journal.append(payload)
  journal.close()


def payloads_of(journal, first=None):
  first = journal.first_number if first is None else first
  return [payload for _, payload in journal.records(first)]


def test_a_record_in_parts_is_one(folder):
  journal = Journal(folder, OWNER)
  journal.append(b'abc', memoryview(bytes(range(4))), b'')
  assert payloads_of(journal) == [b'abc' + bytes(range(4))]
  journal.close()


def the_file(folder):
  [path] = pathlib.Path(folder).iterdir()
  return path


def test_what_was_appended_is_read_again(folder):
  fill(folder)
  journal = Journal(folder, OWNER)
  assert journal.cut is None
  assert journal.next_number == len(PAYLOADS)
  assert list(journal.records(0)) == list(enumerate(PAYLOADS))
  assert payloads_of(journal, 4) == PAYLOADS[4:]
  assert payloads_of(journal, 6) == []
  assert journal.append(b'more') == 6
  assert payloads_of(journal, 6) == [b'more']
  journal.close()


def test_segments_that_a_snapshot_makes_superfluous_are_removed(folder):
  journal = Journal(folder, OWNER)
  for payload in PAYLOADS[:3]:
    journal.append(payload)
  journal.begin_segment()
  journal.begin_segment()  # There is nothing in it yet.
  for payload in PAYLOADS[3:]:
    journal.append(payload)
  assert len(list(pathlib.Path(folder).iterdir())) == 2
  assert payloads_of(journal) == PAYLOADS
  # A snapshot that holds records 0 and 1 makes no segment superfluous.
  journal.remove_before(2)
  assert journal.first_number == 0
  journal.remove_before(3)
  assert journal.first_number == 3
  journal.close()
  journal = Journal(folder, OWNER)
  assert list(journal.records(3)) == list(enumerate(PAYLOADS))[3:]
  with pytest.raises(JournalError, match=r'record 2 .* holds records 3 to 5'):
    payloads_of(journal, 2)
  journal.close()


def run(journal, acknowledged, kept):
  """Appends, and takes snapshots; notes what nobody may lose any more."""
  for number, payload in enumerate(PAYLOADS):
    journal.append(payload)
    acknowledged.append(number)
    if number in (1, 3):
      journal.begin_segment()
      kept[0] = number + 1  # From here on, the snapshot does not hold it.
      journal.remove_before(number + 1)


def num_operations():
  disk = CrashingDisk()
  run(Journal('folder', OWNER, disk), [], [0])
  return disk.operations


@pytest.mark.parametrize('crash_at', range(1, num_operations() + 1))
@pytest.mark.parametrize('seed', range(20))
def test_a_machine_that_dies_loses_nothing_that_was_acknowledged(
  crash_at, seed
):
  disk = CrashingDisk(crash_at)
  acknowledged, kept = [], [0]
  with pytest.raises(Crashed):
    run(Journal('folder', OWNER, disk), acknowledged, kept)
  disk = disk.after_crash(seed)
  for _ in range(2):  # Opening it changes nothing that counts.
    journal = Journal('folder', OWNER, disk)
    assert journal.first_number <= kept[0]
    found = list(journal.records(journal.first_number))
    numbers = [number for number, _ in found]
    assert numbers == list(range(journal.first_number, journal.next_number))
    assert [payload for _, payload in found] == [PAYLOADS[n] for n in numbers]
    # The one that was being written may have made it, or not.
    assert journal.next_number - len(acknowledged) in (0, 1)
    journal.close()
  journal = Journal('folder', OWNER, disk)
  journal.append(b'more')
  assert payloads_of(journal, journal.next_number - 1) == [b'more']


def test_a_torn_tail_is_cut(folder):
  fill(folder)
  path = the_file(folder)
  whole = path.read_bytes()
  fill(folder + '2', PAYLOADS[:-1])
  shorter = len(the_file(folder + '2').read_bytes())
  for size in range(shorter, len(whole)):
    path.write_bytes(whole[:size])
    journal = Journal(folder, OWNER)
    assert payloads_of(journal) == PAYLOADS[:-1]
    if size > shorter:
      assert journal.cut is not None
      assert journal.cut.offset == shorter
      assert journal.cut.num_bytes == size - shorter
    journal.close()
    assert path.stat().st_size == shorter


def test_a_flipped_bit_is_never_believed(folder):
  """In the last record it is as if torn; elsewhere nothing is thrown away."""
  fill(folder)
  path = the_file(folder)
  whole = path.read_bytes()
  fill(folder + '2', PAYLOADS[:-1])
  last = len(the_file(folder + '2').read_bytes())
  for at in range(len(whole)):
    flipped = bytearray(whole)
    flipped[at] ^= 1 << (at % 8)
    path.write_bytes(flipped)
    if at >= last:
      journal = Journal(folder, OWNER)
      assert payloads_of(journal) == PAYLOADS[:-1]
      journal.close()
    else:
      with pytest.raises(JournalError, match='damaged'):
        Journal(folder, OWNER)
      assert path.read_bytes() == bytes(flipped)


def test_damage_in_an_older_segment_is_found_when_it_is_read(folder):
  journal = Journal(folder, OWNER)
  journal.append(b'old')
  journal.begin_segment()
  journal.append(b'new')
  journal.close()
  old = min(pathlib.Path(folder).iterdir())
  data = bytearray(old.read_bytes())
  data[-1] ^= 1
  old.write_bytes(data)
  journal = Journal(folder, OWNER)
  assert payloads_of(journal, 1) == [b'new']
  with pytest.raises(JournalError, match=r'record 0 in .* is damaged'):
    payloads_of(journal, 0)
  journal.close()
  old.unlink()
  journal = Journal(folder, OWNER)
  assert journal.first_number == 1
  journal.close()


some_payloads = st.lists(st.binary(max_size=40), max_size=5)


@given(some_payloads)
def test_the_oracle_of_what_is_read(payloads):
  assert journal_oracle.read(journal_oracle.segment(payloads)) == payloads


@given(some_payloads, st.binary(max_size=200))
def test_no_bytes_are_too_strange(payloads, data):
  journal_oracle.read(data)
  read = journal_oracle.read(journal_oracle.segment(payloads) + data)
  assert read == payloads


@given(some_payloads, st.data())
def test_no_damage_is_too_strange(payloads, data):
  damaged = bytearray(journal_oracle.segment(payloads))
  for _ in range(data.draw(st.integers(1, 4))):
    at = data.draw(st.integers(0, len(damaged)))
    removed = data.draw(st.integers(0, 30))
    damaged[at : at + removed] = data.draw(st.binary(max_size=30))
  read = journal_oracle.read(bytes(damaged))
  if read is not None:
    assert read == payloads[: len(read)]


def test_a_journal_has_one_owner(folder):
  fill(folder)
  with pytest.raises(JournalError, match='another run; give each run a folder'):
    Journal(folder, OWNER + 1)
  path = the_file(folder)
  path.rename(path.with_name(f'{3:020}.journal'))
  with pytest.raises(JournalError, match='was renamed; name it'):
    Journal(folder, OWNER)


class Failing(Disk):
  """Refuses one kind of operation; writes, when the room is used up."""

  def __init__(self, operation, room=0):
    self.operation = operation
    self.room = room

  def write(self, file, offset, data):
    """Full in the middle."""
    if self.operation == 'write':
      room, self.room = self.room, max(self.room - len(data), 0)
      super().write(file, offset, data[:room])
      if room < len(data):
        raise OSError(errno.ENOSPC, 'No space left on device')
    else:
      super().write(file, offset, data)

  def sync(self, file):
    """The drive is dying."""
    if self.operation == 'sync':
      raise OSError(errno.EIO, 'Input/output error')
    super().sync(file)

  def sync_folder(self, folder):
    """The drive is dying, and the names are where it dies."""
    if self.operation == 'sync_folder':
      raise OSError(errno.EIO, 'Input/output error')
    super().sync_folder(folder)

  def create(self, path):
    """The folder is read-only."""
    if self.operation == 'create':
      raise OSError(errno.EROFS, 'Read-only file system')
    return super().create(path)


def failing(folder, operation, room=0):
  """A filled journal whose disk fails from now on."""
  fill(folder)
  disk = Failing('')
  journal = Journal(folder, OWNER, disk)
  disk.operation, disk.room = operation, room
  return journal, disk


@pytest.mark.parametrize('room', [0, 5, 24, 35])
def test_a_full_disk_leaves_the_journal_as_it_was(folder, room):
  journal, disk = failing(folder, 'write', room)
  for _ in range(2):
    with pytest.raises(OSError, match='No space left'):
      journal.append(b'does not fit')
    disk.room = room
  assert payloads_of(journal) == PAYLOADS
  disk.operation = ''
  journal.append(b'fits')
  journal.close()
  journal = Journal(folder, OWNER)
  assert payloads_of(journal) == [*PAYLOADS, b'fits']
  assert journal.cut is None
  journal.close()


def test_a_disk_that_fails_to_synchronise_is_not_trusted_again(folder):
  journal, disk = failing(folder, 'sync')
  with pytest.raises(OSError, match='Input/output'):
    journal.append(b'perhaps')
  disk.operation = ''
  with pytest.raises(OSError, match=r'broken .* open it again'):
    journal.append(b'never')
  journal.close()
  with pytest.raises(OSError, match='closed'):
    journal.append(b'never')
  journal = Journal(folder, OWNER)
  assert payloads_of(journal)[:6] == PAYLOADS
  journal.close()


def test_a_segment_that_cannot_be_begun(folder):
  journal, disk = failing(folder, 'create')
  with pytest.raises(OSError, match='Read-only'):
    journal.begin_segment()
  journal.append(b'more')
  disk.operation = ''
  journal.begin_segment()
  journal.append(b'most')
  assert payloads_of(journal, 6) == [b'more', b'most']
  journal.close()


def test_a_segment_that_may_have_its_name_or_not(folder):
  """What went to the old file after that would not be found again."""
  journal, disk = failing(folder, 'sync_folder')
  with pytest.raises(OSError, match='Input/output'):
    journal.begin_segment()
  disk.operation = ''
  with pytest.raises(OSError, match=r'broken .* open it again'):
    journal.append(b'to which file?')
  journal.close()
  journal = Journal(folder, OWNER)
  assert journal.append(b'more') == len(PAYLOADS)
  journal.close()
  journal = Journal(folder, OWNER)
  assert payloads_of(journal) == [*PAYLOADS, b'more']
  journal.close()


def test_a_segment_that_was_removed_is_not_removed_again(folder):
  journal, disk = failing(folder, '')
  journal.begin_segment()
  journal.append(b'more')
  disk.operation = 'sync_folder'
  with pytest.raises(OSError, match='Input/output'):
    journal.remove_before(len(PAYLOADS))
  disk.operation = ''
  assert payloads_of(journal) == [b'more']
  journal.begin_segment()
  journal.remove_before(len(PAYLOADS) + 1)
  assert journal.first_number == len(PAYLOADS) + 1
  journal.close()
