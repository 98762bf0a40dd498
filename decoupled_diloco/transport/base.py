"""What a transport does, whichever it is."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from decoupled_diloco.protocol.messages import Message

# Any contiguous bytes. Whoever sends them leaves them as they are until they
# are sent: they are not copied.
Payload: TypeAlias = bytes | bytearray | memoryview


class Parcel(NamedTuple):
  """A message that came in, with its payload.

  Attributes:
    message: the message.
    payload: its payload, read-only; b'' if it has none or is not intact.
    is_intact: the payload has the length and the checksum that it should have.
    wire_bytes: size of both as received, framing included.
  """

  message: Message
  payload: Payload
  is_intact: bool
  wire_bytes: int


class LinkUp(NamedTuple):
  """A learner's link has a connection; it is for the learner to say hello."""


class LinkDown(NamedTuple):
  """A learner's link has no connection, for this reason, and tries again.

  Attributes:
    reason: for people.
    dropped: the messages whose payloads the syncer did not acknowledge in full:
      not sent, partly sent, or sent and perhaps received.
  """

  reason: str
  dropped: tuple[Message, ...] = ()


LinkEvent: TypeAlias = Parcel | LinkUp | LinkDown

# What they return is ignored.
OnParcel: TypeAlias = Callable[[int, Parcel], object]
OnLost: TypeAlias = Callable[[int, str], object]


class LearnerLink(Protocol):
  """A learner's side: one connection to the syncer, made again for ever."""

  def start(self) -> None:
    """Begins to connect, in the background."""
    ...

  def send(
    self, message: Message, payload: Payload = b''
  ) -> tuple[Message, ...]:
    """Queues a message; never waits.

    One without payload is a control message, and overtakes those with one.
    Nothing is kept while there is no connection: until `receive` has returned
    the `LinkUp` of the current one, a message is dropped, and is returned. So
    the syncer never hears on one connection what was meant for another.

    Returns:
      The messages dropped by this: the oldest unsent one with a payload if too
      many are queued, `message` itself if there is no connection.

    Raises:
      ValueError: if the payload or the message is too large, or a field has a
        value that cannot be sent.
    """
    ...

  def receive(self, timeout_seconds: float) -> LinkEvent | None:
    """The next event, in order; None if none comes in that time.

    `LinkUp` and `LinkDown` alternate, but that `LinkDown` is repeated when the
    reason for being down has changed, and may come first.
    """
    ...

  def close(self, drain_seconds: float) -> None:
    """Ends the connection; the queued control messages get so long to go out.

    Payloads that are not sent yet are dropped. May be called again.
    """
    ...

  @property
  def bytes_sent(self) -> int:
    """Bytes of all packets sent, over all connections."""
    ...

  @property
  def bytes_received(self) -> int:
    """Bytes of all packets received, over all connections."""
    ...


class PeerBytes(NamedTuple):
  """Bytes of all packets of one peer, framing included."""

  sent: int
  received: int


class SyncerEndpoint(Protocol):
  """The syncer's side: a connection, here called peer, per learner.

  A peer is a number that is never used again; which learner it is, its messages
  say.
  """

  def start(self, on_parcel: OnParcel, on_lost: OnLost) -> None:
    """Begins to listen.

    Args:
      on_parcel: called with each parcel, in order per peer, from a thread of
        the transport. While it runs, nothing more is read from that peer.
      on_lost: called exactly once per peer, after its last parcel, however the
        connection ended.

    Raises:
      OSError: if the address cannot be listened on.
    """
    ...

  @property
  def address(self) -> str:
    """Where it listens, as host:port, known once started."""
    ...

  def send(self, peer: int, message: Message, payload: Payload = b'') -> bool:
    """Queues a message; never waits. As `LearnerLink.send`, but:

    Returns:
      False if the message is not sent: the peer is gone, or its queue of
      payloads is full. A peer with a full queue of control messages is
      disconnected.
    """
    ...

  def disconnect(self, peer: int, reason: str) -> None:
    """Ends a connection, once its queued control messages are sent.

    Payloads are dropped, parcels are no longer handed out. What is not sent
    after `disconnect_seconds` is dropped too.
    """
    ...

  def close(self, drain_seconds: float) -> None:
    """Disconnects everybody and stops to listen. May be called again.

    When it returns, the address is free, and no callback comes any more.
    """
    ...

  def queued_payloads(self, peer: int) -> int:
    """How many payloads wait for their turn; 0 for a peer that is gone."""
    ...

  def peer_bytes(self, peer: int) -> PeerBytes:
    """The traffic of a connected peer; zeros for one that is gone."""
    ...
