"""What waits for the thread that drives the syncer's machine."""

import collections
import threading
from typing import Generic, TypeVar

Item = TypeVar('Item')


class EventInbox(Generic[Item]):
  """A queue, bounded for the world outside and never for one's own work.

  A transport thread that finds no room waits, and with it its learner's stream.
  What an executor has made must not wait: it may be handed in by the very
  thread that empties the inbox, and there is never much of it.

  Args:
    size: how many items leave no room.
  """

  def __init__(self, size: int):
    self._size = size
    self._items: collections.deque[Item] = collections.deque()
    self._changed = threading.Condition()
    self._is_closed = False

  def put(self, item: Item) -> None:
    """Adds an item, once there is room; drops it if the inbox is closed."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._is_closed or len(self._items) < self._size
      )
      self._add(item)

  def put_result(self, item: Item) -> None:
    """Adds an item at once; drops it if the inbox is closed."""
    with self._changed:
      self._add(item)

  def get(self, timeout_seconds: float) -> Item | None:
    """The oldest item; None if none comes in that time."""
    with self._changed:
      self._changed.wait_for(lambda: self._items, timeout_seconds)
      if not self._items:
        return None
      item = self._items.popleft()
      self._changed.notify_all()
      return item

  def close(self) -> None:
    """Nobody reads any more: whoever waits for room goes on."""
    with self._changed:
      self._is_closed = True
      self._items.clear()
      self._changed.notify_all()

  def _add(self, item: Item) -> None:
    if not self._is_closed:
      self._items.append(item)
      self._changed.notify_all()
