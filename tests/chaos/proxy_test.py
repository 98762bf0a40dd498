"""A proxied link carries everything, unless it is cut, slow or bad."""

import contextlib
import socket
import threading

import pytest

from decoupled_diloco.chaos.proxy import LinkProxies

SECONDS = 20.0


class Echo:
  """A server that sends back what it gets."""

  def __init__(self):
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.address = self._listener.getsockname()
    self._connections = []
    threading.Thread(target=self._accept, daemon=True).start()

  def _accept(self):
    with contextlib.suppress(OSError):
      while True:
        connection, _ = self._listener.accept()
        self._connections.append(connection)
        threading.Thread(
          target=self._serve, args=(connection,), daemon=True
        ).start()

  def _serve(self, connection):
    with contextlib.suppress(OSError):
      while data := connection.recv(1 << 16):
        connection.sendall(data)

  def close(self):
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    for connection in self._connections:
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
      connection.close()


@pytest.fixture
def echo():
  server = Echo()
  yield server
  server.close()


@pytest.fixture
def proxies(echo):
  found = LinkProxies(2, lambda: echo.address)
  yield found
  found.close()


def connect(proxies, learner=0):
  host, port = proxies.address(learner).split(':')
  return socket.create_connection((host, int(port)), SECONDS)


def receive(connection, count):
  data = b''
  while len(data) < count:
    more = connection.recv(count - len(data))
    assert more
    data += more
  return data


def test_everything_gets_through(proxies):
  sent = bytes(range(256)) * 2000
  with connect(proxies) as connection:
    threading.Thread(
      target=connection.sendall, args=(sent,), daemon=True
    ).start()
    assert receive(connection, len(sent)) == sent


def test_a_cut_link_holds_everything_back(proxies):
  with connect(proxies) as one, connect(proxies, 1) as other:
    one.sendall(b'before')
    assert receive(one, 6) == b'before'
    proxies.set_cut(0, True)
    one.sendall(b'during')
    # Another learner's link is not cut; when its answer is here, that of the
    # first would be, too.
    other.sendall(b'other')
    assert receive(other, 5) == b'other'
    one.setblocking(False)
    with pytest.raises(BlockingIOError):
      one.recv(1)
    one.setblocking(True)
    one.settimeout(SECONDS)
    proxies.set_cut(0, False)
    assert receive(one, 6) == b'during'


def test_one_bit_of_bulk_data_is_flipped(proxies):
  sent = bytes(4096)
  with connect(proxies) as connection:
    proxies.flip_bit(0)
    connection.sendall(b'small')
    assert receive(connection, 5) == b'small'
    assert proxies.num_flipped(0) == 0
    connection.sendall(sent)
    got = receive(connection, len(sent))
    assert sum(bin(byte).count('1') for byte in got) == 1
    assert proxies.num_flipped(0) == 1
    connection.sendall(sent)
    assert receive(connection, len(sent)) == sent


def test_a_slow_link_delays_and_loses_nothing(proxies):
  proxies.set_bandwidth(0, 1e6)
  sent = bytes(range(256)) * 400
  with connect(proxies) as connection:
    connection.sendall(sent)
    assert receive(connection, len(sent)) == sent
  proxies.set_bandwidth(0, None)


def test_an_end_is_passed_on(proxies, echo):
  with connect(proxies) as connection:
    connection.sendall(b'x')
    assert receive(connection, 1) == b'x'
    echo.close()
    assert connection.recv(1) == b''
  # Nobody listens there any more: the connection is closed at once.
  with connect(proxies) as connection:
    assert connection.recv(1) == b''


def test_closing(proxies):
  with connect(proxies) as connection:
    connection.sendall(b'x')
    assert receive(connection, 1) == b'x'
    proxies.close()
    assert connection.recv(1) == b''
  proxies.close()
