"""What a syncer must not lose: its merges, in a journal and in snapshots.

  snapshots/N   all arrays, and what the machine remembered, after the records
                0 to N-1 of the journal
  journal/      a record for each merge (its merged delta, what was published,
                what the machine remembered when it began), and one for each
                start of the syncer
  lock          held by the process that writes here

A merge is on disk before anybody hears of it. A snapshot makes the records
before it superfluous; the one before is kept as well, with the records since,
in case that the newest is damaged.
"""

import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

import jax
import xxhash

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol.syncer_state import SyncerState
from decoupled_diloco.runtime.durability_options import DurabilityOptions
from decoupled_diloco.runtime.syncer_records import (
  FORMAT,
  Description,
  LifeRecord,
  Progress,
  life_record,
  merge_record,
  read_record,
)
from decoupled_diloco.storage.disk import Disk
from decoupled_diloco.storage.folder_lock import FolderLock
from decoupled_diloco.storage.journal import Journal
from decoupled_diloco.storage.snapshot_folder import (
  NoSoundSnapshotError,
  SnapshotFolder,
  num_bytes,
)
from decoupled_diloco.training.global_model import GlobalModel, Merged

_KEPT_SNAPSHOTS = 2
# How often people are told how far a replay has come.
_TELL_SECONDS = 5.0


class StoreError(ValueError):
  """A run cannot be continued from its folder; says why and what to do."""


class Restored(NamedTuple):
  """What was found of a run.

  Attributes:
    run_id: its name.
    began_at: when it began, in seconds of Unix time.
    life: how often its syncer was started, this time included.
    state: what the machine remembered when the last merge began; None if there
      was none.
    merged: rounds whose merges had not ended then, and are durable.
    num_replayed: merges that came from the journal.
    notes: sentences for people.
  """

  run_id: str
  began_at: float
  life: int
  state: SyncerState | None
  merged: tuple[int, ...]
  num_replayed: int
  notes: tuple[str, ...]


class SyncerStore:
  """The folder of one run's syncer.

  `record` is called by one thread at a time, which may be another one than that
  which has opened the store.

  Args:
    folder: where all of this lies; local.
    model: the global parameters.
    layout: digest of the fragments and the codecs.
    options: see there.
    executor: where snapshots are written.
    tell: is given sentences for people.
    disk: where the journal lies.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    model: GlobalModel,
    *,
    layout: str,
    options: DurabilityOptions,
    executor: Executor,
    tell: Callable[[str], None] = lambda text: None,
    disk: Disk | None = None,
  ):
    self.folder = pathlib.Path(folder)
    self._snapshots = SnapshotFolder(self.folder / 'snapshots')
    self.tell = tell
    self._model = model
    self._layout = layout
    self._options = options
    self._executor = executor
    self._disk = disk
    self._run_id = ''
    self._began_at = 0.0
    self._progress = Progress()
    self._journal: Journal | None = None
    self._guard = threading.Lock()  # Of the journal.
    self._lock = FolderLock(self.folder)
    self._is_snapshotting = False
    self._snapshot_bytes = 0

  # Opening.

  def begin(self, run_id: str) -> Restored:
    """Begins a run: its initial parameters are durable when this returns.

    Raises:
      StoreError: if the folder holds a run, or another process uses it.
      OSError: if it cannot be written.
    """
    self._acquire()
    numbers = self._snapshots.numbers()
    if numbers == [0] and self._is_blank():
      # The process that began it has ended before anything was merged.
      shutil.rmtree(self.folder / 'journal', ignore_errors=True)
    elif numbers:
      raise StoreError(
        f'{self.folder} holds a run already; continue it with '
        '--config.resume=True, or choose another config.workdir.'
      )
    self._run_id, self._began_at = run_id, time.time()
    self._save(0, self._model.arrays(), self._describe())
    self._open_journal()
    self._begin_life()
    return Restored(run_id, self._began_at, 1, None, (), 0, ())

  def resume(self) -> Restored:
    """Brings the model to where the run was.

    Raises:
      StoreError: if there is nothing to continue, or another process does.
      JournalError: if the journal is damaged in its middle.
      OSError: if something cannot be read or written.
    """
    self._acquire()
    notes: list[str] = []
    number = self._restore_snapshot(notes)
    journal = self._open_journal()
    if journal.cut is not None:
      notes.append(
        f'{journal.cut.num_bytes:,} bytes were cut off the end of the journal '
        f'{journal.cut.path}: a record that was being written when the syncer '
        'was killed; nothing of it was published.'
      )
    count = self._replay(journal, number, notes)
    self._begin_life()
    life, state, merged = self._progress
    return Restored(
      self._run_id, self._began_at, life, state, merged, count, tuple(notes)
    )

  def _is_blank(self) -> bool:
    """Whether nothing was merged in the run whose snapshot 0 is here."""
    self._run_id = self._snapshots.describe(0)['run_id']
    journal = self._open_journal()
    is_blank = all(
      isinstance(read_record(record, number), LifeRecord)
      for number, record in journal.records(0)
    )
    journal.close()
    self._journal = None
    return is_blank

  def _acquire(self) -> None:
    try:
      self._lock.acquire()
    except BlockingIOError:
      raise StoreError(
        f'{self.folder} is in use by another syncer; end that one, or choose '
        'another config.workdir.'
      ) from None
    except OSError as error:
      raise OSError(
        f'The folder {self.folder} cannot be written ({error.strerror}); '
        'choose another config.workdir.'
      ) from error

  def _open_journal(self) -> Journal:
    owner = xxhash.xxh3_64_intdigest(self._run_id.encode())
    folder = str(self.folder / 'journal')
    self._journal = Journal(folder, owner, self._disk)
    return self._journal

  def _begin_life(self) -> None:
    assert self._journal is not None
    self._progress = self._progress._replace(life=self._progress.life + 1)
    self._journal.append(life_record(self._progress.life))

  def _restore_snapshot(self, notes: list[str]) -> int:
    """Takes the newest sound snapshot; returns its number."""
    like = jax.eval_shape(self._model.arrays)
    try:
      found = self._snapshots.newest(like, self._check)
    except NoSoundSnapshotError as error:
      raise StoreError(
        f'{error} No other one is left; restore one from a copy.'
      ) from error
    if found is None:
      raise StoreError(
        f'{self.folder} holds no run that could be continued; leave '
        'config.resume at False to begin one.'
      )
    notes += found.notes
    self._snapshots.set_aside(found.damaged)
    self._snapshots.tidy(_KEPT_SNAPSHOTS)
    self._model.restore(found.arrays)
    self._snapshot_bytes = num_bytes(found.arrays)
    self._run_id, self._began_at, _, self._progress = Description.from_jsonable(
      found.description
    )
    return found.number

  def _check(self, description: Mapping[str, Any]) -> None:
    if description.get('format') != FORMAT:
      raise StoreError(
        f'{self.folder} has the format {description.get("format")}, and this '
        f'version reads {FORMAT}; continue the run with the version of '
        'decoupled_diloco that began it.'
      )
    if description['layout'] != self._layout:
      raise StoreError(
        f'the run in {self.folder} has another layout of model, fragments and '
        f'codecs ({description["layout"][:12]} instead of '
        f'{self._layout[:12]}); continue it with the config that it was begun '
        'with.'
      )

  def _replay(self, journal: Journal, first: int, notes: list[str]) -> int:
    """Applies the merges from a record on; returns how many there were."""
    total = journal.next_number - first
    told_at = time.monotonic()
    count = different = 0
    for number, data in journal.records(first):
      record = read_record(data, number)
      if isinstance(record, LifeRecord):
        self._progress = self._progress._replace(life=record.life)
        continue
      is_same = self._model.replay(
        record.fragment, record.delta, record.payload
      )
      different += not is_same
      count += 1
      self._progress = self._progress.after_merge(record.state, record.round)
      if time.monotonic() > told_at + _TELL_SECONDS:
        told_at = time.monotonic()
        self.tell(f'Replaying the journal: {number - first:,} of {total:,}.')
    if different:
      notes.append(
        f'In {different} of {count} replayed merges this machine rounds the '
        'outer step otherwise than the one before did. Parameters are exactly '
        "those that were published; the outer optimizer's state differs from "
        'the former one in last bits.'
      )
    return count

  # Writing.

  def record(self, state: SyncerState, merge: fx.Merge, merged: Merged) -> None:
    """Makes a merge durable, which the model has made.

    Args:
      state: what the machine remembered when the merge began.
      merge: what was merged.
      merged: what came of it.

    Raises:
      OSError: if the disk does not take it.
    """
    assert self._journal is not None
    parts = merge_record(state, merge, merged, self._model.form)
    try:
      with self._guard:
        self._journal.append(*parts)
    except OSError as error:
      raise OSError(
        f'The journal {self.folder / "journal"} cannot take the merge of round '
        f'{merge.round} ({error.strerror or error}), so it is not published; '
        'free some space, and continue with --config.resume=True.'
      ) from error
    self._progress = self._progress.after_merge(state, merge.round)
    limit = self._options.snapshot_growth * self._snapshot_bytes
    if self._journal.num_bytes > limit and not self._is_snapshotting:
      self._begin_snapshot()

  def _begin_snapshot(self) -> None:
    """Takes copies of everything as it is now, to be written elsewhere."""
    assert self._journal is not None
    try:
      with self._guard:
        self._journal.begin_segment()
    except OSError as error:
      self._do_without(error)
      return
    self._is_snapshotting = True
    number, arrays = self._journal.next_number, self._model.arrays()
    description = self._describe()
    self._executor.submit(self._finish_snapshot, number, arrays, description)

  def _finish_snapshot(
    self, number: int, arrays: dict[str, Any], description: dict[str, Any]
  ) -> None:
    try:
      self._save(number, arrays, description)
      oldest = self._snapshots.tidy(_KEPT_SNAPSHOTS)
      with self._guard:
        if self._journal is not None:
          self._journal.remove_before(oldest)
    except (OSError, ValueError) as error:
      self._do_without(error)
    finally:
      self._is_snapshotting = False

  def _do_without(self, error: Exception) -> None:
    # The journal has everything; it only grows longer than it should.
    self.tell(f'No snapshot was taken: {error}')

  def _save(
    self, number: int, arrays: dict[str, Any], description: dict[str, Any]
  ) -> None:
    self._snapshots.save(number, arrays, description)
    self._snapshot_bytes = num_bytes(arrays)

  def _describe(self) -> dict[str, Any]:
    return Description(
      self._run_id, self._began_at, self._layout, self._progress
    ).to_jsonable()

  def close(self) -> None:
    """Lets go of the folder; a second time does nothing."""
    with self._guard:
      if self._journal is not None:
        self._journal.close()
        self._journal = None
    self._lock.release()


def holds_run(folder: str | os.PathLike[str]) -> bool:
  """Whether there is a run that `SyncerStore.resume` could continue."""
  return bool(SnapshotFolder(pathlib.Path(folder) / 'snapshots').numbers())
