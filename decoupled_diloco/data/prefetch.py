"""Prepares the next items in a background thread, and keeps exact positions.

grain's own prefetching works on single elements of its datasets; this one
prefetches whole scans of any iterator, moves them to the device in the same
thread, and holds no more of them than it is told: they live in device memory.
"""

import collections
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar('T')
Item = TypeVar('Item', covariant=True)


class StatefulIterator(Protocol[Item]):
  """An iterator whose position can be saved and restored."""

  def __next__(self) -> Item: ...

  def get_state(self) -> dict[str, Any]:
    """A JSON-able dict, which later calls of `__next__` do not change."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues as the iterator did that `state` was taken from."""
    ...


class Prefetcher(Generic[T]):
  """Iterates over `iterator`, at most `depth` items ahead.

  Its state is the position of what was *consumed*: items that were prepared
  and not yet taken are prepared again after a restore. From construction on
  the iterator belongs to the thread, so do not touch it yourself. A context
  manager; one consumer at a time.
  """

  def __init__(
    self,
    iterator: StatefulIterator[Any],
    depth: int = 2,
    place: Callable[[Any], T] | None = None,
  ):
    """Starts the thread.

    Args:
      iterator: where items come from, at its present position.
      depth: the most items that are prepared and not yet taken.
      place: applied to each item in the thread, for example
        `lambda batch: jax.device_put(batch, sharding)`.

    Raises:
      ValueError: if `depth` is not positive.
    """
    if depth < 1:
      raise ValueError(
        f'depth must be at least 1, got {depth}; use the iterator itself if '
        'nothing is to be prepared ahead.'
      )
    self._iterator = iterator
    self._depth = depth
    self._place = place
    self._state = iterator.get_state()
    self._changed = threading.Condition()
    self._closed = False
    self._start()

  def __iter__(self) -> 'Prefetcher[T]':
    return self

  def __next__(self) -> T:
    """Returns the next item; waits for it if need be.

    Raises:
      Exception: what the iterator or `place` raised, in its turn, and again
        in every later call (`StopIteration` at the end).
      RuntimeError: if the prefetcher is closed.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._ready or self._error is not None or self._closed
      )
      if self._closed:
        raise RuntimeError('this Prefetcher is closed; make a new one.')
      if not self._ready:
        assert self._error is not None
        raise self._error
      item, self._state = self._ready.popleft()
      self._changed.notify_all()
      return item

  def get_state(self) -> dict[str, Any]:
    """Returns the iterator's state right after the item taken last."""
    return dict(self._state)

  def set_state(self, state: dict[str, Any]) -> None:
    """Drops what is prepared and continues from `state`.

    Raises:
      ValueError: if the iterator refuses `state`; it then goes on from where
        it was.
      RuntimeError: if the prefetcher is closed.
    """
    if self._closed:
      raise RuntimeError('this Prefetcher is closed; make a new one.')
    self._stop()
    try:
      self._iterator.set_state(state)
    except BaseException:
      # The thread had run ahead of what was consumed.
      self._iterator.set_state(self._state)
      raise
    finally:
      self._state = self._iterator.get_state()
      self._start()

  def close(self) -> None:
    """Ends the thread, after at most the one item that it is working on."""
    with self._changed:
      self._closed = True
    self._stop()

  def __enter__(self) -> 'Prefetcher[T]':
    return self

  def __exit__(self, *unused_exception: object) -> None:
    self.close()

  def _start(self) -> None:
    self._ready: collections.deque[tuple[T, dict[str, Any]]] = (
      collections.deque()
    )
    self._error: BaseException | None = None
    self._stopping = False
    # Daemon: a consumer that dies without closing must not keep the process.
    self._thread = threading.Thread(
      target=self._run, name='data-prefetch', daemon=True
    )
    self._thread.start()

  def _stop(self) -> None:
    with self._changed:
      self._stopping = True
      self._changed.notify_all()
    self._thread.join()
    self._ready.clear()

  def _run(self) -> None:
    try:
      while True:
        # Room first, work second: never more than `depth` items exist.
        with self._changed:
          self._changed.wait_for(
            lambda: self._stopping or len(self._ready) < self._depth
          )
          if self._stopping:
            return
        item = next(self._iterator)
        state = self._iterator.get_state()
        placed = item if self._place is None else self._place(item)
        with self._changed:
          self._ready.append((placed, state))
          self._changed.notify_all()
    except BaseException as error:  # raised again in the consumer
      with self._changed:
        self._error = error
        self._changed.notify_all()
