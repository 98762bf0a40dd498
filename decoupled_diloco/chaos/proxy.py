"""A link that can be cut, slowed down, and made to flip bits.

Each learner of a chaos run reaches its syncer through a proxy of its own, on
loopback, in the process that injects the faults. It carries bytes and knows
nothing of what they mean.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

# How much is read at once; what a cut link holds back is at most a few of them.
_CHUNK_BYTES = 1 << 16
# Payloads come in pieces of at least this size, everything else is smaller.
_BULK_BYTES = 512
_CALL_SECONDS = 10.0
_CONNECT_SECONDS = 5.0


class LinkProxies:
  """The proxies of all learners, on a thread of their own.

  Args:
    num_learners: M.
    upstream: host and port of the syncer, asked for each connection.
  """

  def __init__(
    self, num_learners: int, upstream: Callable[[], tuple[str, int]]
  ):
    self._upstream = upstream
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
    self._thread.start()
    self._links = [
      self._call(_Link.listening(upstream)) for _ in range(num_learners)
    ]

  def address(self, learner: int) -> str:
    """Where a learner finds its syncer."""
    return f'127.0.0.1:{self._links[learner].port}'

  def set_cut(self, learner: int, is_cut: bool) -> None:
    """Lets nothing through any more, in either direction; or everything.

    A connection stays open meanwhile, as it does when a router drops packets;
    what was sent and not delivered arrives when the link is whole again.
    """
    self._call(self._links[learner].set_cut(is_cut))

  def set_bandwidth(self, learner: int, bytes_per_second: float | None) -> None:
    """Lets through at most so much in each direction; None for everything."""
    self._call(self._links[learner].set_bandwidth(bytes_per_second))

  def flip_bit(self, learner: int) -> None:
    """Flips one bit in the next bulk data from the learner."""
    self._call(self._links[learner].flip_bit())

  def num_flipped(self, learner: int) -> int:
    """How many bits were flipped so far."""
    return self._links[learner].num_flipped

  def close(self) -> None:
    """Closes all connections; a second time does nothing."""
    if not self._thread.is_alive():
      return
    for link in self._links:
      self._call(link.close())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(_CALL_SECONDS)
    self._loop.close()

  def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
    future = asyncio.run_coroutine_threadsafe(work, self._loop)
    return future.result(_CALL_SECONDS)


class _Link:
  """The proxy of one learner; all methods run on the event loop."""

  def __init__(self, upstream: Callable[[], tuple[str, int]]):
    self.port = 0
    self.num_flipped = 0
    self._upstream = upstream
    self._server: asyncio.Server | None = None
    self._is_open = asyncio.Event()
    self._is_open.set()
    self._bytes_per_second: float | None = None
    self._flips_due = 0
    self._tasks: set[asyncio.Task] = set()

  @classmethod
  async def listening(cls, upstream: Callable[[], tuple[str, int]]) -> '_Link':
    link = cls(upstream)
    link._server = await asyncio.start_server(link._serve, '127.0.0.1', 0)
    link.port = link._server.sockets[0].getsockname()[1]
    return link

  async def set_cut(self, is_cut: bool) -> None:
    if is_cut:
      self._is_open.clear()
    else:
      self._is_open.set()

  async def set_bandwidth(self, bytes_per_second: float | None) -> None:
    self._bytes_per_second = bytes_per_second

  async def flip_bit(self) -> None:
    self._flips_due += 1

  async def close(self) -> None:
    assert self._server is not None
    self._server.close()
    for task in list(self._tasks):
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)

  async def _serve(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    task = asyncio.current_task()
    assert task is not None
    self._tasks.add(task)
    try:
      # Whoever dies or closes takes the other end along, as without a proxy.
      with contextlib.suppress(OSError, asyncio.CancelledError):
        await self._join(reader, writer)
    finally:
      self._tasks.discard(task)
      writer.close()

  async def _join(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    await self._is_open.wait()
    there, back = await asyncio.wait_for(
      asyncio.open_connection(*self._upstream()), _CONNECT_SECONDS
    )
    try:
      up = asyncio.ensure_future(self._carry(reader, back, is_up=True))
      down = asyncio.ensure_future(self._carry(there, writer, is_up=False))
      try:
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
      finally:
        for carrying in (up, down):
          carrying.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
    finally:
      back.close()

  async def _carry(
    self,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    is_up: bool,
  ) -> None:
    while data := await reader.read(_CHUNK_BYTES):
      await self._is_open.wait()
      if is_up and self._flips_due and len(data) >= _BULK_BYTES:
        self._flips_due -= 1
        self.num_flipped += 1
        data = _with_flipped_bit(data)
      if self._bytes_per_second is not None:
        await asyncio.sleep(len(data) / self._bytes_per_second)
      writer.write(data)
      await writer.drain()


def _with_flipped_bit(data: bytes) -> bytes:
  """One bit in the middle is another one: there a payload is likeliest."""
  middle = len(data) // 2
  return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
