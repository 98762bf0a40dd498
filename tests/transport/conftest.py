"""Both transports behind one face, with the same faults to order."""

import abc
import contextlib
import queue
import socket
import threading

import pytest

from decoupled_diloco.transport.addresses import split_address
from decoupled_diloco.transport.base import LearnerLink, LinkUp, SyncerEndpoint
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.grpc_link import GrpcLink
from decoupled_diloco.transport.memory import MemoryNetwork
from decoupled_diloco.transport.memory_ends import MemoryLink
from decoupled_diloco.transport.options import TransportOptions

# How long an event may take on a busy machine before the test fails.
DEADLINE_SECONDS = 30

# Small enough that a payload of a megabyte is many windows.
OPTIONS = TransportOptions(
  chunk_bytes=32 << 10,
  window_bytes=256 << 10,
  max_payload_bytes=6 << 20,
  max_message_bytes=4 << 10,
  endpoint_queue=3,
  receive_queue=2,
  backoff_initial_seconds=0.01,
  backoff_maximum_seconds=0.1,
)


class FaultyProxy:
  """A TCP proxy that can hold, cut and corrupt what passes through it."""

  def __init__(self):
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.address = f'127.0.0.1:{self._listener.getsockname()[1]}'
    self._target = ''
    self._may_pass = threading.Event()
    self._may_pass.set()
    self._corrupts = threading.Event()
    self._sockets: list[socket.socket] = []
    self._threads: list[threading.Thread] = []
    self._spawn(self._accept)

  def lead_to(self, target: str):
    self._target = target

  def hold(self):
    self._may_pass.clear()

  def release(self):
    self._may_pass.set()

  def corrupt_next(self):
    """Flips a bit in the next run of 1000 bytes 0xa5, which payloads are."""
    self._corrupts.set()

  def sever(self):
    sockets, self._sockets = self._sockets, []
    for each in sockets:
      # Whoever waits for it wakes up; close alone would not do that.
      with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
      each.close()

  def close(self):
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    self._may_pass.set()
    self._threads[0].join()
    self.sever()
    for thread in self._threads:
      thread.join()

  def _spawn(self, target, *args):
    thread = threading.Thread(target=target, args=args)
    self._threads.append(thread)
    thread.start()

  def _accept(self):
    while True:
      try:
        near, _ = self._listener.accept()
      except OSError:
        return
      try:
        far = socket.create_connection(split_address(self._target))
      except OSError:
        near.close()
        continue
      for each in (near, far):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
      self._sockets += [near, far]
      self._spawn(self._forward, near, far)
      self._spawn(self._forward, far, near)

  def _forward(self, source: socket.socket, target: socket.socket):
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 16):
        self._may_pass.wait()
        run = data.find(b'\xa5' * 1000)
        if run >= 0 and self._corrupts.is_set():
          self._corrupts.clear()
          data = bytearray(data)
          data[run + 500] ^= 1
        target.sendall(data)
    for each in (source, target):
      with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


class Harness(abc.ABC):
  """An endpoint, its links, and what has arrived at the endpoint."""

  @abc.abstractmethod
  def new_endpoint(self) -> SyncerEndpoint: ...

  @abc.abstractmethod
  def new_link(self) -> LearnerLink: ...

  @abc.abstractmethod
  def hold(self):
    """From now on nothing passes."""

  @abc.abstractmethod
  def release(self):
    """From now on everything passes again."""

  @abc.abstractmethod
  def corrupt_next(self):
    """Flips a bit of the next payload that is all 0xa5."""

  @abc.abstractmethod
  def sever(self):
    """Breaks the connections, as both sides notice."""

  def __init__(self):
    self.arrivals = queue.Queue()
    self._links: list[LearnerLink] = []
    self.start_endpoint()

  def start_endpoint(self):
    self.endpoint = self.new_endpoint()
    self.endpoint.start(
      lambda peer, parcel: self.arrivals.put((peer, parcel)),
      lambda peer, reason: self.arrivals.put((peer, reason)),
    )

  def arrival(self):
    """The next (peer, parcel or reason for its loss)."""
    return self.arrivals.get(timeout=DEADLINE_SECONDS)

  def link(self):
    """A link that is up."""
    link = self.new_link()
    link.start()
    assert self.event(link) == LinkUp()
    return link

  def event(self, link):
    event = link.receive(DEADLINE_SECONDS)
    assert event is not None, 'Nothing has come in time.'
    return event

  def connect(self, message):
    """A link that is up, and its peer, known by this first message."""
    link = self.link()
    assert link.send(message) == ()
    peer, parcel = self.arrival()
    assert parcel.message == message
    return link, peer

  def close(self):
    for link in self._links:
      link.close(0)
    self.endpoint.close(0)


class MemoryHarness(Harness):
  def __init__(self):
    self._network = MemoryNetwork(OPTIONS, is_automatic=True)
    self._memory_links: list[MemoryLink] = []
    super().__init__()

  def new_endpoint(self):
    return self._network.endpoint()

  def new_link(self):
    link = self._network.link()
    self._links.append(link)
    self._memory_links.append(link)
    return link

  def hold(self):
    for link in self._memory_links:
      self._network.partition(link)

  def release(self):
    for link in self._memory_links:
      self._network.heal(link)

  def corrupt_next(self):
    for link in self._memory_links:
      self._network.corrupt_next(link)

  def sever(self):
    for link in self._memory_links:
      self._network.sever(link)


class GrpcHarness(Harness):
  def __init__(self):
    self._proxy = FaultyProxy()
    self._address = '127.0.0.1:0'
    super().__init__()

  def new_endpoint(self):
    return GrpcEndpoint(self._address, OPTIONS)

  def start_endpoint(self):
    super().start_endpoint()
    self._address = self.endpoint.address
    self._proxy.lead_to(self._address)

  def new_link(self):
    link = GrpcLink(self._proxy.address, OPTIONS)
    self._links.append(link)
    return link

  def hold(self):
    self._proxy.hold()

  def release(self):
    self._proxy.release()

  def corrupt_next(self):
    self._proxy.corrupt_next()

  def sever(self):
    self._proxy.release()
    self._proxy.sever()

  def close(self):
    super().close()
    self._proxy.close()


@pytest.fixture(params=[MemoryHarness, GrpcHarness], ids=['memory', 'grpc'])
def harness(request):
  with contextlib.closing(request.param()) as harness:
    yield harness


@pytest.fixture
def faulty_proxy():
  with contextlib.closing(FaultyProxy()) as proxy:
    yield proxy
