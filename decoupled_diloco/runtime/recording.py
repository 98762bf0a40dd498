"""A tape is written beside the thread whose events are on it."""

import queue
import threading
from collections.abc import Sequence
from typing import Self

from decoupled_diloco.protocol.effects import Effect
from decoupled_diloco.protocol.events import Event
from decoupled_diloco.protocol.machine import OnStep

# Events that wait to be written. Whoever has another one waits for room: a
# decision that is not on the tape could not be replayed.
_QUEUE_SIZE = 4096


class Recording:
  """Writes events down on a thread of its own: in order, and all of them.

  A context manager; on leaving it, what was put is written.

  Args:
    record: writes one event with its effects; called by that thread only.
    queue_size: how many events may wait.
  """

  def __init__(self, record: OnStep, queue_size: int = _QUEUE_SIZE):
    self._record = record
    self._queue: queue.Queue[tuple[Event, Sequence[Effect]] | None] = (
      queue.Queue(queue_size)
    )
    self._error: BaseException | None = None
    self._has_failed = False
    self._thread = threading.Thread(
      target=self._run, name='recording', daemon=True
    )

  def __enter__(self) -> Self:
    self._thread.start()
    return self

  def __exit__(self, kind: type | None, error: object, trace: object) -> None:
    self._queue.put(None)
    self._thread.join()
    # An exception that is on its way says more than the tape's does.
    if kind is None:
      self.check()

  def put(self, event: Event, effects: Sequence[Effect]) -> None:
    """Lets an event be written; waits if too many are.

    Raises:
      BaseException: as `check` does.
    """
    self.check()
    self._queue.put((event, effects))

  def check(self) -> None:
    """Finds out whether everything could be written so far.

    Raises:
      BaseException: once, what the writing of an event has raised. The tape
        ends before that event, for it must not have a gap.
    """
    error, self._error = self._error, None
    if error is not None:
      raise error

  def _run(self) -> None:
    while (item := self._queue.get()) is not None:
      if self._has_failed:
        continue  # Takes out what comes, so that nobody waits for room.
      try:
        self._record(*item)
      except BaseException as error:
        self._has_failed, self._error = True, error
