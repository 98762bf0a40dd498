"""A learner's snapshots: taken at scan boundaries, written beside the training.

Each holds all that a new process needs to go on as if it had never ended:
parameters, the inner optimizer's state, random stream, bases and residuals of
all fragments, and what the machine remembered: counters and data position.
"""

import concurrent.futures
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.records import from_jsonable, to_jsonable
from decoupled_diloco.runtime.snapshot_options import SnapshotOptions
from decoupled_diloco.storage.snapshot_folder import SnapshotFolder

FORMAT = 1
_KEPT = 2


class Restored(NamedTuple):
  """A snapshot that was found.

  Attributes:
    arrays: as `LocalModel.snapshot` has given them.
    state: what the machine remembered.
  """

  arrays: Mapping[str, Any]
  state: LearnerState


class LearnerSnapshots:
  """The snapshots of one learner.

  Args:
    folder: where they lie; local.
    peers: where those of the other learners lie.
    layout: digest of the fragments and the codecs.
    options: see there.
    tell: is given sentences for people.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    *,
    peers: Sequence[str | os.PathLike[str]] = (),
    layout: str,
    options: SnapshotOptions,
    tell: Callable[[str], None] = lambda text: None,
  ):
    self._folder = SnapshotFolder(folder)
    self._peers = [SnapshotFolder(peer) for peer in peers]
    self._layout = layout
    self._options = options
    self._tell = tell
    self._executor = concurrent.futures.ThreadPoolExecutor(1, 'snapshot')
    self._writing: concurrent.futures.Future[None] | None = None
    self._taken_at: float | None = None

  def is_due(self, now: float) -> bool:
    """Whether it is time for the next, and the last one is written."""
    if not self._options.every_seconds:
      return False
    if self._writing is not None and not self._writing.done():
      return False
    if self._taken_at is None:
      self._taken_at = now  # What the run begins with is the syncer's to keep.
    return now >= self._taken_at + self._options.every_seconds

  def take(
    self, now: float, state: LearnerState, arrays: Mapping[str, Any]
  ) -> None:
    """Has a snapshot written.

    Args:
      now: by the clock that `is_due` is asked with.
      state: what the machine remembers.
      arrays: those of `LocalModel.snapshot`; its own.
    """
    if not self._options.every_seconds:
      return
    self._taken_at = now
    self._writing = self._executor.submit(self._write, state, arrays)

  def _write(self, state: LearnerState, arrays: Mapping[str, Any]) -> None:
    description = {
      'format': FORMAT,
      'layout': self._layout,
      'state': to_jsonable(state),
    }
    number = state.total_steps
    try:
      # After a restart it may come by the same step again.
      if number not in self._folder.numbers():
        self._folder.save(number, arrays, description)
      self._folder.tidy(_KEPT)
    except (OSError, ValueError) as error:
      # The run does not depend on it.
      self._tell(f'no snapshot was taken: {error}')

  def restore(self, like: Mapping[str, Any]) -> Restored | None:
    """The learner's own newest snapshot; None if it has none that is sound."""
    found = self._restore(self._folder, like)
    if found is None:
      self.set_aside()
    return found

  def set_aside(self) -> None:
    """Lets none of its own count any more: those that follow are the newest.

    Raises:
      OSError: if that cannot be.
    """
    self._folder.set_aside(self._folder.numbers())

  def restore_from_peer(self, like: Mapping[str, Any]) -> Restored | None:
    """The newest snapshot of any other learner; None if there is none."""
    for peer in sorted(self._peers, key=_newest, reverse=True):
      found = self._restore(peer, like)
      if found is not None:
        return found
    return None

  def _restore(
    self, folder: SnapshotFolder, like: Mapping[str, Any]
  ) -> Restored | None:
    try:
      found = folder.newest(like, self._check)
      if found is None:
        return None
      state = from_jsonable(found.description['state'])
    except (ValueError, OSError) as error:
      self._tell(f'does not use the snapshots in {folder.folder}: {error}')
      return None
    for note in found.notes:
      self._tell(note)
    if folder is self._folder:  # Others' are theirs to look after.
      folder.set_aside(found.damaged)
    return Restored(found.arrays, state)

  def _check(self, description: Mapping[str, Any]) -> None:
    if description.get('format') != FORMAT:
      raise _UnsuitableError('another version of decoupled_diloco took them')
    if description['layout'] != self._layout:
      raise _UnsuitableError(
        'they are of another layout of model, fragments and codecs'
      )

  def close(self) -> None:
    """Waits for what is being written."""
    self._executor.shutdown()


class _UnsuitableError(ValueError):
  """A snapshot is sound, and not for this learner."""


def _newest(folder: SnapshotFolder) -> int:
  return max(folder.numbers(), default=-1)
