"""What a learner's link has received and the learner has not looked at yet."""

import collections
import threading
from typing import Generic, TypeVar

T = TypeVar('T')


class Inbox(Generic[T]):
  """A bounded queue between threads that can be closed from either end."""

  def __init__(self, capacity: int):
    self._capacity = capacity
    self._items: collections.deque[T] = collections.deque()
    self._changed = threading.Condition()
    self._is_closed = False

  @property
  def is_full(self) -> bool:
    """Whether `put` would wait."""
    return len(self._items) >= self._capacity

  def put(self, item: T):
    """Adds an item, waiting for room; drops it if the inbox is closed."""
    with self._changed:
      while self.is_full and not self._is_closed:
        self._changed.wait()
      if not self._is_closed:
        self._items.append(item)
        self._changed.notify_all()

  def add(self, item: T):
    """As `put`, but without waiting: for who has looked at `is_full` before.

    There may be more in the inbox than it should hold, by what is added before
    whoever adds looks again.
    """
    with self._changed:
      if not self._is_closed:
        self._items.append(item)
        self._changed.notify_all()

  def get(self, timeout_seconds: float) -> T | None:
    """The oldest item, waiting so long for one; None if there is none."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._items or self._is_closed, timeout_seconds
      )
      if not self._items:
        return None
      item = self._items.popleft()
      self._changed.notify_all()
      return item

  def close(self):
    """Lets nothing more in, and nobody wait."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
