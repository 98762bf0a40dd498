"""The two ends of the transport inside one process; see `memory`."""

import dataclasses
from typing import Protocol

from decoupled_diloco.protocol.messages import Message
from decoupled_diloco.transport.base import (
  LinkDown,
  LinkEvent,
  OnLost,
  OnParcel,
  Parcel,
  Payload,
  PeerBytes,
)
from decoupled_diloco.transport.inbox import Inbox
from decoupled_diloco.transport.stream import (
  CLOSED_BY_LEARNER,
  CLOSED_BY_SYNCER,
  FrameStream,
)

_INBOX_CAPACITY = 1024


class Network(Protocol):
  """What the ends need of a `MemoryNetwork`."""

  is_automatic: bool

  def deliver(self) -> int:
    """Delivers everything that has been sent."""
    ...

  def announce(self) -> None:
    """There may be something to deliver."""
    ...

  def listen(self, endpoint: 'MemoryEndpoint') -> None:
    """Lets links connect to this endpoint."""
    ...

  def stop_listening(self, endpoint: 'MemoryEndpoint') -> None:
    """The opposite; connections that are there are not touched."""
    ...


@dataclasses.dataclass(eq=False)
class MemoryConnection:
  """Two streams back to back; each side may have noticed its end, or not."""

  peer: int
  endpoint: 'MemoryEndpoint'
  learner: FrameStream
  syncer: FrameStream
  learner_knows: bool = False
  syncer_knows: bool = False


class MemoryEndpoint:
  """A `SyncerEndpoint` on a `MemoryNetwork`."""

  def __init__(self, network: Network, max_peers: int):
    self._network = network
    self._max_peers = max_peers
    self.connections: dict[int, MemoryConnection] = {}
    self.on_parcel: OnParcel = lambda peer, parcel: None
    self.on_lost: OnLost = lambda peer, reason: None

  @property
  def address(self) -> str:
    """See `SyncerEndpoint.address`; there is only one."""
    return 'memory:1'

  @property
  def has_room(self) -> bool:
    """Whether another peer may connect."""
    return len(self.connections) < self._max_peers

  def start(self, on_parcel: OnParcel, on_lost: OnLost):
    """See `SyncerEndpoint.start`."""
    self.on_parcel = on_parcel
    self.on_lost = on_lost
    self._network.listen(self)
    self._network.announce()

  def send(self, peer: int, message: Message, payload: Payload = b'') -> bool:
    """See `SyncerEndpoint.send`."""
    connection = self.connections.get(peer)
    if connection is None:
      return False
    is_queued = connection.syncer.send_or_refuse(message, payload)
    self._network.announce()
    return is_queued

  def disconnect(self, peer: int, reason: str):
    """See `SyncerEndpoint.disconnect`."""
    connection = self.connections.get(peer)
    if connection is not None:
      connection.syncer.finish(reason)
      self._network.announce()

  def close(self, drain_seconds: float):
    """See `SyncerEndpoint.close`; drains, if time is given, by delivering."""
    self._network.stop_listening(self)
    connections = tuple(self.connections.values())
    for connection in connections:
      connection.syncer.finish(CLOSED_BY_SYNCER)
    if drain_seconds > 0:
      self._network.deliver()
    for connection in connections:
      connection.syncer.fail(CLOSED_BY_SYNCER)
    self._network.deliver()

  def queued_payloads(self, peer: int) -> int:
    """See `SyncerEndpoint.queued_payloads`."""
    connection = self.connections.get(peer)
    return 0 if connection is None else connection.syncer.num_unsent

  def peer_bytes(self, peer: int) -> PeerBytes:
    """See `SyncerEndpoint.peer_bytes`."""
    connection = self.connections.get(peer)
    if connection is None:
      return PeerBytes(0, 0)
    stream = connection.syncer
    return PeerBytes(stream.bytes_sent, stream.bytes_received)


class MemoryLink:
  """A `LearnerLink` on a `MemoryNetwork`."""

  def __init__(self, network: Network):
    self._network = network
    self._announced: FrameStream | None = None
    self._past_sent = 0
    self._past_received = 0
    self.inbox: Inbox[tuple[LinkEvent, FrameStream | None]] = Inbox(
      _INBOX_CAPACITY
    )
    self.connection: MemoryConnection | None = None
    self.is_open = False
    self.is_partitioned = False
    self.corrupts_next = False

  def start(self):
    """See `LearnerLink.start`."""
    self.is_open = True
    self._network.announce()

  def send(
    self, message: Message, payload: Payload = b''
  ) -> tuple[Message, ...]:
    """See `LearnerLink.send`."""
    stream = self._announced  # It may be gone at any moment.
    if stream is None:
      return (message,)
    dropped = stream.send_or_drop(message, payload)
    self._network.announce()
    return dropped

  def receive(self, timeout_seconds: float) -> LinkEvent | None:
    """See `LearnerLink.receive`; waits only if the network is automatic."""
    item = self.inbox.get(timeout_seconds if self._network.is_automatic else 0)
    if item is None:
      return None
    event, stream = item
    if isinstance(event, Parcel):
      assert stream is not None
      stream.settle(event)
      self._network.announce()
    else:
      self._announced = stream
    return event

  def close(self, drain_seconds: float):
    """See `LearnerLink.close`; drains, if time is given, by delivering."""
    self.is_open = False
    self.inbox.close()
    connection = self.connection
    if connection is not None:
      stream = connection.learner
      stream.finish(CLOSED_BY_LEARNER)
      if drain_seconds > 0:
        self._network.deliver()
      stream.fail(CLOSED_BY_LEARNER)
      self._network.announce()

  @property
  def bytes_sent(self) -> int:
    """See `LearnerLink.bytes_sent`."""
    connection = self.connection
    current = connection.learner.bytes_sent if connection else 0
    return self._past_sent + current

  @property
  def bytes_received(self) -> int:
    """See `LearnerLink.bytes_received`."""
    connection = self.connection
    current = connection.learner.bytes_received if connection else 0
    return self._past_received + current

  def on_end(self, stream: FrameStream):
    """The connection is gone, and this side knows it."""
    self._past_sent += stream.bytes_sent
    self._past_received += stream.bytes_received
    if self._announced is stream:
      self._announced = None
    self.inbox.add((LinkDown(stream.reason, stream.dropped), None))
