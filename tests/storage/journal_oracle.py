"""What must hold whatever bytes a journal's file has, for tests and fuzzing."""

import struct
from collections.abc import Sequence

import xxhash

from decoupled_diloco.storage.journal import Journal, JournalError
from tests.storage.crashing_disk import CrashingDisk

OWNER = 7
_FOLDER = 'folder'
_PATH = f'{_FOLDER}/{0:020}.journal'
# What is looked for behind a damaged record at a time, and a little more.
_SEARCHED_BYTES = 2**20 + 3


class SparingDisk(CrashingDisk):
  """A disk in memory that does not let more be asked for than there is."""

  def read(self, file, offset, count):
    """See `Disk`."""
    limit = max(self.size(file), _SEARCHED_BYTES)
    assert count <= limit, f'{count} bytes are asked for at once.'
    return super().read(file, offset, count)


def segment(payloads: Sequence[bytes]) -> bytes:
  """A file with these records, made without the journal's own code."""
  head = b'ddljrnl1' + struct.pack('<QQ', 0, OWNER)
  parts = [head, struct.pack('<Q', xxhash.xxh3_64_intdigest(head))]
  for number, payload in enumerate(payloads):
    checksum = xxhash.xxh3_64_intdigest(payload, seed=number)
    parts += [b'rec\xa9', struct.pack('<IQQ', len(payload), number, checksum)]
    parts.append(payload)
  return b''.join(parts)


def read(data: bytes) -> list[bytes] | None:
  """The records of a journal with this file; None if it says it is damaged.

  Raises:
    AssertionError: if what is read is not what must be read.
    Exception: anything but a JournalError is a fault too.
  """
  disk = SparingDisk()
  disk.write(disk.create(_PATH), 0, data)
  try:
    journal = Journal(_FOLDER, OWNER, disk)
  except JournalError:
    return None
  except ValueError as error:
    raise AssertionError(f'not a JournalError: {error!r}') from error
  records = list(journal.records(0))
  assert [number for number, _ in records] == list(range(len(records)))
  payloads = [payload for _, payload in records]
  # All that is believed is there as it would have been written, from the
  # beginning; and what came behind it is gone.
  believed = segment(payloads)
  assert data.startswith(believed)
  assert (journal.cut is None) == (data == believed)
  if journal.cut is not None:
    assert journal.cut.offset == len(believed)
    assert journal.cut.num_bytes == len(data) - len(believed)
  # And it goes on from there.
  assert journal.append(b'more') == len(payloads)
  journal.close()
  again = Journal(_FOLDER, OWNER, disk)
  assert again.cut is None
  assert [p for _, p in again.records(0)] == [*payloads, b'more']
  again.close()
  return payloads
