"""The syncer's endpoint, over gRPC."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc

from decoupled_diloco.protocol.messages import Message
from decoupled_diloco.transport import grpc_settings
from decoupled_diloco.transport.addresses import join_address, split_address
from decoupled_diloco.transport.base import (
  OnLost,
  OnParcel,
  Payload,
  PeerBytes,
)
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.security import SecurityOptions
from decoupled_diloco.transport.stream import (
  CLOSED_BY_SYNCER,
  LOST,
  FrameStream,
)
from decoupled_diloco.transport.wire import WireError

_logger = logging.getLogger(__name__)

# Threads beyond those of the peers, to tell others that there is no room.
_SPARE_THREADS = 4


class GrpcEndpoint:
  """A `SyncerEndpoint`: a gRPC server with one bidirectional stream per peer.

  Each peer has two threads: one of the server's pool sends, one reads. Whoever
  has started it must close it: with a peer connected, the process would wait
  for those of the pool when it ends.

  Args:
    address: host:port to listen on; port 0 for any that is free.
    options: sizes and timeouts.
    security: TLS and run token.
    max_peers: connections at a time; further ones are refused.
    clock: the time in seconds.

  Raises:
    ValueError: if the address needs TLS and there is none, or a TLS file or the
      file of the token cannot be read.
  """

  def __init__(
    self,
    address: str,
    options: TransportOptions | None = None,
    security: SecurityOptions | None = None,
    *,
    max_peers: int = 64,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._wanted_address = address
    self._options = options or TransportOptions()
    self._security = security or SecurityOptions()
    self._security.check_address(address)
    self._credentials = self._security.server_credentials()
    self._security.check_token()
    self._max_peers = max_peers
    self._clock = clock
    self._lock = threading.Lock()
    self._peers: dict[int, FrameStream] = {}
    self._readers: dict[int, threading.Thread] = {}
    self._numbers = itertools.count(1)
    self._is_closed = False
    self._address = ''
    self._server: grpc.Server | None = None
    self._pool: futures.ThreadPoolExecutor | None = None
    self._on_parcel: OnParcel = lambda peer, parcel: None
    self._on_lost: OnLost = lambda peer, reason: None

  @property
  def address(self) -> str:
    """See `SyncerEndpoint.address`."""
    return self._address

  def start(self, on_parcel: OnParcel, on_lost: OnLost):
    """See `SyncerEndpoint.start`."""
    self._on_parcel = on_parcel
    self._on_lost = on_lost
    num_threads = self._max_peers + _SPARE_THREADS
    self._pool = futures.ThreadPoolExecutor(num_threads, 'endpoint-sender')
    self._server = grpc.server(
      self._pool,
      handlers=[
        grpc.method_handlers_generic_handler(
          grpc_settings.SERVICE,
          {
            grpc_settings.METHOD: grpc.stream_stream_rpc_method_handler(
              self._exchange
            )
          },
        )
      ],
      options=grpc_settings.server_arguments(self._options),
      maximum_concurrent_rpcs=num_threads,
    )
    host, port = split_address(self._wanted_address)
    try:
      if self._credentials is None:
        port = self._server.add_insecure_port(self._wanted_address)
      else:
        port = self._server.add_secure_port(
          self._wanted_address, self._credentials
        )
    except RuntimeError as error:
      raise OSError(
        f'address={self._wanted_address} must be free and of this host, but '
        'cannot be listened on: stop what uses the port (perhaps an older '
        'syncer), or choose another one; port 0 takes any.'
      ) from error
    self._address = join_address(host, port)
    self._server.start()

  def send(self, peer: int, message: Message, payload: Payload = b'') -> bool:
    """See `SyncerEndpoint.send`."""
    stream = self._stream(peer)
    return stream is not None and stream.send_or_refuse(message, payload)

  def disconnect(self, peer: int, reason: str):
    """See `SyncerEndpoint.disconnect`."""
    stream = self._stream(peer)
    if stream is not None:
      stream.finish(reason)

  def close(self, drain_seconds: float):
    """See `SyncerEndpoint.close`."""
    with self._lock:
      self._is_closed = True
      streams = list(self._peers.values())
      readers = list(self._readers.values())
    if self._server is None or self._pool is None:
      return
    for stream in streams:
      stream.finish(CLOSED_BY_SYNCER)
    self._server.stop(drain_seconds).wait()
    self._pool.shutdown(wait=True)
    for reader in readers:
      if reader is threading.current_thread():
        continue
      reader.join(self._options.disconnect_seconds)
      if reader.is_alive():
        _logger.warning(
          '%s still waits for its on_parcel or on_lost to return.', reader.name
        )

  def queued_payloads(self, peer: int) -> int:
    """See `SyncerEndpoint.queued_payloads`."""
    stream = self._stream(peer)
    return 0 if stream is None else stream.num_unsent

  def peer_bytes(self, peer: int) -> PeerBytes:
    """See `SyncerEndpoint.peer_bytes`."""
    stream = self._stream(peer)
    if stream is None:
      return PeerBytes(0, 0)
    return PeerBytes(stream.bytes_sent, stream.bytes_received)

  def _stream(self, peer: int) -> FrameStream | None:
    with self._lock:
      return self._peers.get(peer)

  def _exchange(
    self, requests: Iterator[bytes], context: grpc.ServicerContext
  ) -> Iterator[bytes]:
    """The life of a connection, in a thread of the server's pool."""
    self._admit(context)
    stream = FrameStream(
      self._options,
      self._clock,
      bulk_queue=self._options.endpoint_queue,
      # A payload that `on_parcel` still has is the one there may be.
      receive_queue=1,
      on_end=lambda is_at_once: self._limit(context),
    )
    peer = next(self._numbers)
    reader = threading.Thread(
      target=self._read,
      args=(peer, stream, requests),
      name=f'endpoint-reader-{peer}',
      daemon=True,
    )
    with self._lock:
      has_room = not self._is_closed and len(self._peers) < self._max_peers
      if has_room:
        # First, so that a host with no more threads leaves no place taken.
        reader.start()
        self._peers[peer] = stream
        self._readers[peer] = reader
    if not has_room:
      _logger.warning(
        '%s was refused: there are max_peers=%d connections already.',
        context.peer(),
        self._max_peers,
      )
      context.abort(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f'The syncer has all of its max_peers={self._max_peers} connections, '
        'or is closing.',
      )
    context.send_initial_metadata((grpc_settings.GREETING,))
    if not context.add_callback(lambda: stream.fail(LOST)):
      stream.fail(LOST)
    yield from stream.packets()
    context.set_code(grpc.StatusCode.ABORTED)
    context.set_details(stream.reason)

  @property
  def _too_silent(self) -> str:
    return (
      'This connection has sent no message within connect_seconds='
      f'{self._options.connect_seconds}; a learner says hello at once.'
    )

  def _limit(self, context: grpc.ServicerContext):
    """Leaves a connection that is ending only so much time to do so."""
    if self._is_closed:
      return  # The server that is being stopped sees to it.
    timer = threading.Timer(self._options.disconnect_seconds, context.cancel)
    timer.daemon = True
    if context.add_callback(timer.cancel):
      timer.start()

  def _admit(self, context: grpc.ServicerContext):
    if not self._security.is_admitted(context.invocation_metadata()):
      context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        'This learner does not show the run_token of the syncer: it belongs to '
        'another run, or is not configured like it.',
      )

  def _read(self, peer: int, stream: FrameStream, requests: Iterator[bytes]):
    """Hands out what a peer sends, in a thread of its own, until it ends."""
    reason = LOST
    # Or strangers who only connect would take all places.
    silence = threading.Timer(
      self._options.connect_seconds, stream.finish, [self._too_silent]
    )
    silence.daemon = True
    try:
      silence.start()
      for data in requests:
        for parcel in stream.feed(data):
          silence.cancel()
          if not stream.is_ending:
            self._on_parcel(peer, parcel)
          stream.settle(parcel)
    except grpc.RpcError:
      pass  # How gRPC says that the connection is gone; so it is lost.
    except WireError as error:
      reason = f'The learner sent what it must not: {error}'
    except Exception:
      _logger.exception('A parcel of peer %d could not be taken in.', peer)
      reason = 'The syncer could not take in a parcel; its log says why.'
    finally:
      silence.cancel()
      # If it has said why it ends the connection, that reason stands. If not,
      # the peer is told why, if it still listens.
      stream.finish(reason)
      with self._lock:
        del self._peers[peer]
      try:
        self._on_lost(peer, stream.reason)
      finally:
        # Not before: closing waits for what is in here.
        with self._lock:
          del self._readers[peer]
