"""A transport inside one process, delivered step by step, with faults to order.

The packets are those of the real transport, and so is everything that makes and
reads them; only the network is missing. Nothing happens by itself: what is sent
arrives when `deliver` is called, in an order that depends on nothing else.
"""

import itertools
import threading

from decoupled_diloco.transport.base import LinkUp
from decoupled_diloco.transport.memory_ends import (
  MemoryConnection,
  MemoryEndpoint,
  MemoryLink,
)
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.stream import (
  LOST,
  FrameStream,
)
from decoupled_diloco.transport.wire import (
  ChunkFrame,
  WireError,
  decode_packet,
  encode_frame,
)


class MemoryNetwork:
  """What connects the links of a test to its endpoint.

  Args:
    options: sizes and queues; its timeouts do not run here.
    is_automatic: whether every call delivers what it causes at once.
  """

  def __init__(
    self, options: TransportOptions | None = None, *, is_automatic: bool = False
  ):
    self.options = options or TransportOptions()
    self.is_automatic = is_automatic
    self._lock = threading.Lock()
    self._is_delivering = False
    self._has_news = False
    self._links: list[MemoryLink] = []
    self._endpoint: MemoryEndpoint | None = None
    self._numbers = itertools.count(1)

  def endpoint(self, *, max_peers: int = 64) -> MemoryEndpoint:
    """A new endpoint; one at a time can be started."""
    return MemoryEndpoint(self, max_peers)

  def link(self) -> MemoryLink:
    """A new learner's link."""
    link = MemoryLink(self)
    self._links.append(link)
    return link

  def deliver(self, max_packets: int | None = None) -> int:
    """Delivers what has been sent, and what is sent because of it.

    The links take turns, in the order in which they were made: each connects,
    or moves one packet up and one down.

    Args:
      max_packets: stop after so many, and leave the rest for later.

    Returns:
      How many packets arrived. 0 within a callback, or while another thread
      delivers: whoever delivers already goes on with it.
    """
    with self._lock:
      self._has_news = True
      if self._is_delivering:
        return 0
      self._is_delivering = True
    num_packets = 0
    try:
      while max_packets is None or num_packets < max_packets:
        with self._lock:
          self._has_news = False
        moved = False
        for link in tuple(self._links):
          for upwards in (True, False):
            if max_packets is None or num_packets < max_packets:
              arrived = self._move(link, upwards)
              num_packets += arrived
              moved |= arrived
          moved |= self._connect(link) or self._notice(link)
        with self._lock:
          if not moved and not self._has_news:
            # From here on somebody else may deliver, so this is not for a
            # `finally` to say once more.
            self._is_delivering = False
            return num_packets
    except BaseException:
      with self._lock:
        self._is_delivering = False
      raise
    with self._lock:
      self._is_delivering = False
    return num_packets

  def partition(self, link: MemoryLink):
    """From now on nothing passes; neither side is told before `sever`."""
    link.is_partitioned = True

  def heal(self, link: MemoryLink):
    """The opposite: what waits passes, and who has no connection gets one."""
    link.is_partitioned = False
    self.announce()

  def sever(self, link: MemoryLink, reason: str = LOST):
    """The connection breaks, as both sides notice: by a ping, or a reset."""
    if link.connection is not None:
      link.connection.learner.fail(reason)
      link.connection.syncer.fail(reason)
      self.announce()

  def corrupt_next(self, link: MemoryLink):
    """One bit of the next chunk from or to this learner is flipped."""
    link.corrupts_next = True

  def announce(self):
    """There may be something to deliver."""
    if self.is_automatic:
      self.deliver()

  def listen(self, endpoint: MemoryEndpoint):
    """Lets links connect to this endpoint."""
    if self._endpoint is not None:
      raise OSError(
        f'{endpoint.address} must be free; close the other endpoint first.'
      )
    self._endpoint = endpoint

  def stop_listening(self, endpoint: MemoryEndpoint):
    """The opposite; connections that are there are not touched."""
    if self._endpoint is endpoint:
      self._endpoint = None

  def _connect(self, link: MemoryLink) -> bool:
    endpoint = self._endpoint
    if (
      not link.is_open
      or link.is_partitioned
      or link.connection is not None
      or link.inbox.is_full
      or endpoint is None
      or not endpoint.has_room
    ):
      return False
    link.connection = MemoryConnection(
      next(self._numbers),
      endpoint,
      FrameStream(
        self.options,
        _no_clock,
        bulk_queue=self.options.link_queue,
        receive_queue=self.options.receive_queue,
      ),
      FrameStream(
        self.options,
        _no_clock,
        bulk_queue=self.options.endpoint_queue,
        receive_queue=1,
      ),
    )
    endpoint.connections[link.connection.peer] = link.connection
    link.inbox.add((LinkUp(), link.connection.learner))
    return True

  def _move(self, link: MemoryLink, upwards: bool) -> bool:
    """Moves a packet, if there is one and it may pass."""
    connection = link.connection
    if connection is None or link.is_partitioned:
      return False
    if upwards:
      source, target = connection.learner, connection.syncer
    else:
      source, target = connection.syncer, connection.learner
      if link.inbox.is_full:
        return False
    packet = source.next_packet()
    if packet is None:
      if source.is_ending:
        # All packets are there, so now the other side notices the end.
        target.fail(source.reason)
        source.fail(source.reason)
      return False
    if link.corrupts_next:
      link.corrupts_next, packet = _corrupt(packet)
    try:
      for parcel in target.feed(packet):
        if target.is_ending:
          target.settle(parcel)
        elif upwards:
          connection.endpoint.on_parcel(connection.peer, parcel)
          target.settle(parcel)
        else:
          link.inbox.add((parcel, target))
    except WireError as error:
      target.finish(f'The other side sent what it must not: {error}')
    return True

  def _notice(self, link: MemoryLink) -> bool:
    """Tells each side of a connection that has ended, once it can know."""
    connection = link.connection
    if connection is None:
      return False
    has_told = False
    if not connection.syncer_knows and _has_ended(
      connection.syncer, link.is_partitioned
    ):
      has_told = connection.syncer_knows = True
      connection.endpoint.connections.pop(connection.peer, None)
      connection.endpoint.on_lost(connection.peer, connection.syncer.reason)
    if (
      not connection.learner_knows
      and not link.inbox.is_full
      and _has_ended(connection.learner, link.is_partitioned)
    ):
      has_told = connection.learner_knows = True
      link.on_end(connection.learner)
    if connection.learner_knows and connection.syncer_knows:
      link.connection = None
    return has_told


def _no_clock() -> float:
  return 0.0


def _has_ended(stream: FrameStream, is_partitioned: bool) -> bool:
  return stream.has_failed or (stream.is_ending and is_partitioned)


def _corrupt(packet: bytes) -> tuple[bool, bytes]:
  """Flips a bit of its first chunk; and whether this is still to be done."""
  frames = [frame for frame, _ in decode_packet(packet)]
  for position, frame in enumerate(frames):
    if isinstance(frame, ChunkFrame):
      data = bytearray(frame.data)
      data[len(data) // 2] ^= 1
      frames[position] = frame._replace(data=bytes(data))
      return False, b''.join(map(encode_frame, frames))
  return True, packet
