"""What is configurable about a transport, and how its timeouts are ordered."""

import dataclasses

# A packet is one gRPC message: this much, gRPC's own default, is accepted from
# any peer however it is configured.
MAX_PACKET_BYTES = 4 << 20
# What is around the data of a chunk in a packet, and an acknowledgement with
# it, at most.
CHUNK_OVERHEAD_BYTES = 64


@dataclasses.dataclass(frozen=True)
class TransportOptions:
  """Sizes, queues and timeouts of both sides of a connection.

  The timeouts, shortest first; nothing else in this package waits. The liveness
  timeout of the protocol (how long a learner may be silent) belongs above
  `bulk_delay_seconds` and below `stall_seconds`.

  1. `backoff_initial_seconds`: pause before the first attempt to reconnect; it
     doubles with every failed one up to `backoff_maximum_seconds`. A random
     part of each pause, up to `backoff_jitter` of it, is left out.
  2. `acknowledge_seconds`: how long the acknowledgement of a small payload
     waits for a packet to travel in, before it gets one of its own.
  3. `bulk_delay_seconds`: how long payload bytes should be on their way at
     most, and with them a heartbeat that is sent behind them. On a slow link,
     fewer bytes are sent ahead until this holds.
  4. `disconnect_seconds`: how long the last control messages to a peer that is
     being disconnected, such as a rejection, may take.
  5. `connect_seconds`: how long an attempt to connect may take; and how long a
     peer may be silent before its first message.
  6. `keepalive_seconds` + `ping_timeout_seconds`: a peer of which nothing is
     heard for the first is asked for a sign of life, and is lost after the
     second: a partition, a stopped process or a dead host is noticed then. (A
     process that dies is noticed at once.)
  7. `stall_seconds`: a peer that answers pings but takes no payload bytes,
     though some are on their way, is disconnected.

  Attributes:
    packet_bytes: what is due at the same time shares a packet of at most so
      many bytes, so that small payloads cost one packet; a larger frame has a
      packet to itself. (An acknowledgement travels with any.)
    chunk_bytes: payload bytes per frame; a control message waits behind one.
    max_bytes_per_second: cap on the payload bytes that a learner sends, and on
      those that the syncer sends to each learner, evenly spread: in no second
      more than 1.1 of it. 0: no cap.
    window_bytes: payload bytes on their way, unacknowledged, at most; for full
      speed at least the link's rate times its round-trip time.
    max_payload_bytes: larger payloads are refused on both sides.
    max_message_bytes: the same for a message without its payload.
    control_queue: control messages waiting to be sent, at most.
    link_queue: payloads waiting to be sent by a learner, at most, besides the
      one that is being sent; the oldest is dropped for a new one.
    endpoint_queue: the same per peer of the syncer, which refuses the new one.
    receive_queue: payloads that a learner has received but not yet looked at,
      before no more are let in.
  """

  packet_bytes: int = 64 << 10
  chunk_bytes: int = 512 << 10
  max_bytes_per_second: float = 0.0
  window_bytes: int = 64 << 20
  max_payload_bytes: int = 8 << 30
  max_message_bytes: int = 256 << 10
  control_queue: int = 1024
  link_queue: int = 2
  endpoint_queue: int = 64
  receive_queue: int = 4
  backoff_initial_seconds: float = 0.2
  backoff_maximum_seconds: float = 2.0
  backoff_jitter: float = 0.5
  acknowledge_seconds: float = 0.05
  bulk_delay_seconds: float = 1.0
  disconnect_seconds: float = 2.0
  connect_seconds: float = 10.0
  keepalive_seconds: float = 10.0
  ping_timeout_seconds: float = 10.0
  stall_seconds: float = 120.0

  def __post_init__(self):
    for name in (
      'packet_bytes',
      'chunk_bytes',
      'max_payload_bytes',
      'max_message_bytes',
      'control_queue',
      'link_queue',
      'endpoint_queue',
      'receive_queue',
    ):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name}={getattr(self, name)} must be at least 1; the default is '
          f'{type(self).__dataclass_fields__[name].default}.'
        )
    limit = MAX_PACKET_BYTES - CHUNK_OVERHEAD_BYTES
    for name in ('packet_bytes', 'chunk_bytes', 'max_message_bytes'):
      if getattr(self, name) > limit:
        raise ValueError(
          f'{name}={getattr(self, name)} must fit a packet of '
          f'{MAX_PACKET_BYTES} bytes; at most {limit}.'
        )
    if self.window_bytes < 2 * self.chunk_bytes:
      raise ValueError(
        f'window_bytes={self.window_bytes} must hold two chunks of '
        f'chunk_bytes={self.chunk_bytes}, or one is never sent while another '
        f'is acknowledged; at least {2 * self.chunk_bytes}.'
      )
    if not 0 <= self.max_bytes_per_second < float('inf'):
      raise ValueError(
        f'max_bytes_per_second={self.max_bytes_per_second} must be finite and '
        'not negative; 0 for no cap.'
      )
    if not 0 <= self.backoff_jitter <= 1:
      raise ValueError(
        f'backoff_jitter={self.backoff_jitter} must be between 0 and 1.'
      )
    self._check_order('backoff_initial_seconds', 'backoff_maximum_seconds')
    self._check_order('acknowledge_seconds', 'bulk_delay_seconds')
    self._check_order('bulk_delay_seconds', 'stall_seconds')
    for name in (
      'backoff_initial_seconds',
      'acknowledge_seconds',
      'bulk_delay_seconds',
      'disconnect_seconds',
      'connect_seconds',
      'keepalive_seconds',
      'ping_timeout_seconds',
    ):
      if not getattr(self, name) > 0:
        raise ValueError(
          f'{name}={getattr(self, name)} must be positive; the default is '
          f'{type(self).__dataclass_fields__[name].default}.'
        )
    if not self.stall_seconds > self.loss_seconds:
      raise ValueError(
        f'stall_seconds={self.stall_seconds} must exceed keepalive_seconds + '
        f'ping_timeout_seconds = {self.loss_seconds}, so that a dead peer is '
        'called dead, not slow.'
      )

  @property
  def loss_seconds(self) -> float:
    """After how long a silent peer is lost, at the latest."""
    return self.keepalive_seconds + self.ping_timeout_seconds

  def _check_order(self, shorter: str, longer: str):
    if getattr(self, shorter) > getattr(self, longer):
      raise ValueError(
        f'{shorter}={getattr(self, shorter)} must not exceed '
        f'{longer}={getattr(self, longer)}.'
      )
