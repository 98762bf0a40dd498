"""A learner's link to the syncer, over gRPC."""

import logging
import random
import threading
import time
from collections.abc import Callable

import grpc

from decoupled_diloco.protocol.messages import Message
from decoupled_diloco.transport import grpc_settings
from decoupled_diloco.transport.backoff import Backoff
from decoupled_diloco.transport.base import (
  LinkDown,
  LinkEvent,
  LinkUp,
  Parcel,
  Payload,
)
from decoupled_diloco.transport.inbox import Inbox
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.security import SecurityOptions
from decoupled_diloco.transport.stream import CLOSED_BY_LEARNER, FrameStream
from decoupled_diloco.transport.wire import WireError

_logger = logging.getLogger(__name__)

_INBOX_CAPACITY = 1024
# With these the syncer speaks, in whole sentences; the others are gRPC's.
_OUR_CODES = (
  grpc.StatusCode.ABORTED,
  grpc.StatusCode.RESOURCE_EXHAUSTED,
  grpc.StatusCode.UNAUTHENTICATED,
)


class GrpcLink:
  """A `LearnerLink`: one bidirectional gRPC stream, made again when it breaks.

  One thread connects and reads; gRPC has one that takes the packets to send.

  Args:
    address: host:port of the syncer.
    options: sizes and timeouts.
    security: TLS and run token.
    rng: for the jitter of the backoff.
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
    rng: random.Random | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._address = address
    self._options = options or TransportOptions()
    self._security = security or SecurityOptions()
    self._security.check_address(address)
    self._credentials = self._security.channel_credentials()
    self._security.check_token()
    self._backoff = Backoff(self._options, rng or random.Random())
    self._clock = clock
    self._inbox: Inbox[tuple[LinkEvent, FrameStream | None]] = Inbox(
      _INBOX_CAPACITY
    )
    self._lock = threading.Lock()
    self._closing = threading.Event()
    # The connection there is; the one that `receive` has said is up.
    self._stream: FrameStream | None = None
    self._announced: FrameStream | None = None
    self._is_up = False
    self._down_reason = ''
    self._past_sent = 0
    self._past_received = 0
    self._thread = threading.Thread(
      target=self._run, name='link-reader', daemon=True
    )

  def start(self):
    """See `LearnerLink.start`."""
    self._thread.start()

  def send(
    self, message: Message, payload: Payload = b''
  ) -> tuple[Message, ...]:
    """See `LearnerLink.send`."""
    with self._lock:
      stream = self._announced
    if stream is None:
      return (message,)
    return stream.send_or_drop(message, payload)

  def receive(self, timeout_seconds: float) -> LinkEvent | None:
    """See `LearnerLink.receive`."""
    item = self._inbox.get(timeout_seconds)
    if item is None:
      return None
    event, stream = item
    if isinstance(event, Parcel):
      assert stream is not None
      stream.settle(event)
    else:
      with self._lock:
        self._announced = stream
    return event

  def close(self, drain_seconds: float):
    """See `LearnerLink.close`."""
    with self._lock:
      self._closing.set()
      stream = self._stream
      is_up = self._is_up
    # From here on nobody is there to receive, and the reader must not wait.
    self._inbox.close()
    if not self._thread.ident:
      return
    if stream is not None and is_up:
      stream.finish(CLOSED_BY_LEARNER)
      # The syncer ends the call when it has read everything.
      self._thread.join(drain_seconds)
    if stream is not None:
      stream.fail(CLOSED_BY_LEARNER)
    self._thread.join()

  @property
  def bytes_sent(self) -> int:
    """See `LearnerLink.bytes_sent`."""
    with self._lock:
      return self._past_sent + (self._stream.bytes_sent if self._stream else 0)

  @property
  def bytes_received(self) -> int:
    """See `LearnerLink.bytes_received`."""
    with self._lock:
      return self._past_received + (
        self._stream.bytes_received if self._stream else 0
      )

  def _run(self):
    while not self._closing.is_set():
      channel = self._open_channel()
      try:
        self._converse(channel)
      finally:
        channel.close()
      self._closing.wait(self._backoff.next())

  def _open_channel(self) -> grpc.Channel:
    arguments = grpc_settings.channel_arguments(
      self._options, self._security.tls_server_name
    )
    if self._credentials is None:
      return grpc.insecure_channel(self._address, arguments)
    return grpc.secure_channel(self._address, self._credentials, arguments)

  def _converse(self, channel: grpc.Channel):
    """Connects, and reads until the connection ends, however it does."""
    call = None

    def cancel(is_at_once: bool):
      if is_at_once and call is not None:
        call.cancel()

    stream = FrameStream(
      self._options,
      self._clock,
      bulk_queue=self._options.link_queue,
      receive_queue=self._options.receive_queue,
      on_end=cancel,
    )
    with self._lock:
      if self._closing.is_set():
        return
      self._stream = stream
    timer = threading.Timer(
      self._options.connect_seconds,
      stream.fail,
      [
        f'{self._address} did not answer within '
        f'{self._options.connect_seconds} s.'
      ],
    )
    timer.daemon = True
    try:
      timer.start()
      call = channel.stream_stream(grpc_settings.METHOD_PATH)(
        stream.packets(), metadata=self._security.call_metadata()
      )
      # The stream may have failed while there was no call to cancel yet.
      if stream.is_ending:
        call.cancel()
      self._read(call, stream, timer)
    except grpc.RpcError as error:
      assert isinstance(error, grpc.Call)
      code = error.code()
      stream.fail(
        f'{self._address}: {error.details()}'
        + (f' ({code.name})' if code not in _OUR_CODES else '')
      )
    except WireError as error:
      stream.fail(f'{self._address} sent what it must not: {error}')
    except Exception:
      # Without this thread nobody would hear of anything any more.
      _logger.exception('What %s sent could not be taken in.', self._address)
      stream.fail(
        f'What {self._address} sent could not be taken in; the log says why.'
      )
    finally:
      timer.cancel()
      stream.fail(f'{self._address} has ended the connection.')
      self._end(stream)

  def _read(self, call, stream: FrameStream, timer: threading.Timer):
    name, ours = grpc_settings.GREETING
    theirs = dict(call.initial_metadata()).get(name)
    if theirs == ours:
      timer.cancel()
      with self._lock:
        self._is_up = True
      self._down_reason = ''
      self._inbox.put((LinkUp(), stream))
    elif theirs is not None:
      stream.fail(
        f'{self._address} has {name}={theirs}, this learner {ours}: both sides '
        'must have the same version of this package.'
      )
      return
    for data in call:
      if not self._is_up:
        # A syncer that lets nobody in ends the call, and says why.
        stream.fail(f'{self._address} is no syncer: it does not greet.')
        return
      for parcel in stream.feed(data):
        self._backoff.reset()
        self._inbox.put((parcel, stream))

  def _end(self, stream: FrameStream):
    with self._lock:
      was_up, self._is_up = self._is_up, False
      self._stream = None
      if self._announced is stream:
        self._announced = None
      self._past_sent += stream.bytes_sent
      self._past_received += stream.bytes_received
    if was_up or stream.reason != self._down_reason:
      self._down_reason = stream.reason
      self._inbox.put((LinkDown(stream.reason, stream.dropped), None))
