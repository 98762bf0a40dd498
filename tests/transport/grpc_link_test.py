"""What is particular to the link over gRPC."""

import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
from concurrent import futures

import grpc
import pytest

from decoupled_diloco.protocol.messages import Hello, Receipt
from decoupled_diloco.transport import grpc_settings
from decoupled_diloco.transport.base import LinkDown, LinkUp, Parcel
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.grpc_link import GrpcLink
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.security import SecurityOptions
from decoupled_diloco.transport.stream import FrameStream

DEADLINE_SECONDS = 30
HELLO = Hello(learner=0, layout='layout')
QUICK = TransportOptions(
  chunk_bytes=32 << 10,
  window_bytes=64 << 10,
  backoff_initial_seconds=0.01,
  backoff_maximum_seconds=0.05,
  bulk_delay_seconds=0.1,
  connect_seconds=0.3,
  keepalive_seconds=0.2,
  ping_timeout_seconds=0.2,
  stall_seconds=0.5,
)


@contextlib.contextmanager
def started(address, options=QUICK, security=None):
  link = GrpcLink(address, options, security, rng=random.Random(0))
  link.start()
  try:
    yield link
  finally:
    link.close(0)


def down(link):
  event = link.receive(DEADLINE_SECONDS)
  assert isinstance(event, LinkDown), event
  return event


@contextlib.contextmanager
def silent_server():
  """Takes connections, as a backlog does, and never says a word."""
  with socket.create_server(('127.0.0.1', 0)) as server:
    yield f'127.0.0.1:{server.getsockname()[1]}'


def test_nobody_there_is_said_once():
  with silent_server() as address:
    pass  # Now nobody listens there.
  with started(address) as link:
    event = down(link)
    assert address in event.reason
    assert 'refused' in event.reason
    # Many attempts later (0.05 s apart at most), it is still the same reason.
    assert link.receive(0.5) is None


def test_a_server_that_does_not_answer():
  with silent_server() as address, started(address) as link:
    assert f'{address} did not answer within 0.3 s' in down(link).reason


def test_a_server_that_is_no_syncer():
  server = grpc.server(futures.ThreadPoolExecutor(1))
  port = server.add_insecure_port('127.0.0.1:0')
  server.start()
  try:
    with started(f'127.0.0.1:{port}') as link:
      assert 'UNIMPLEMENTED' in down(link).reason
  finally:
    server.stop(0).wait()


def test_a_syncer_of_another_version():
  def exchange(requests, context):
    name, _ = grpc_settings.GREETING
    context.send_initial_metadata(((name, '99'),))
    yield from requests

  server = grpc.server(
    futures.ThreadPoolExecutor(2),
    handlers=[
      grpc.method_handlers_generic_handler(
        grpc_settings.SERVICE,
        {grpc_settings.METHOD: grpc.stream_stream_rpc_method_handler(exchange)},
      )
    ],
  )
  port = server.add_insecure_port('127.0.0.1:0')
  server.start()
  try:
    with started(f'127.0.0.1:{port}') as link:
      assert 'must have the same version' in down(link).reason
  finally:
    server.stop(0).wait()


def test_what_cannot_be_taken_in_costs_the_connection_only(monkeypatch, caplog):
  feed = FrameStream.feed
  failures = [MemoryError('no room for it')]

  def feed_or_fail(stream, data):
    if threading.current_thread().name == 'link-reader' and failures:
      raise failures.pop()
    return feed(stream, data)

  monkeypatch.setattr(FrameStream, 'feed', feed_or_fail)
  # An echo.
  endpoint = GrpcEndpoint('127.0.0.1:0', QUICK)
  endpoint.start(
    lambda peer, parcel: endpoint.send(peer, parcel.message), lambda *_: None
  )
  try:
    with started(endpoint.address) as link:
      assert link.receive(DEADLINE_SECONDS) == LinkUp()
      link.send(HELLO)
      assert 'could not be taken in; the log says why' in down(link).reason
      assert 'no room for it' in caplog.text
      assert link.receive(DEADLINE_SECONDS) == LinkUp()
      link.send(HELLO)
      event = link.receive(DEADLINE_SECONDS)
      assert isinstance(event, Parcel)
      assert event.message == HELLO
  finally:
    endpoint.close(0)


def test_the_syncer_takes_nothing(faulty_proxy):
  # The proxy answers no pings while it holds; so those must not be what ends
  # the connection here.
  patient = TransportOptions(
    chunk_bytes=32 << 10,
    window_bytes=64 << 10,
    keepalive_seconds=100,
    ping_timeout_seconds=100,
    stall_seconds=201.0,
  )
  now = [0.0]
  endpoint = GrpcEndpoint('127.0.0.1:0', patient)
  endpoint.start(lambda *_: None, lambda *_: None)
  faulty_proxy.lead_to(endpoint.address)
  link = GrpcLink(faulty_proxy.address, patient, clock=lambda: now[0])
  link.start()
  try:
    assert link.receive(DEADLINE_SECONDS) == LinkUp()
    faulty_proxy.hold()
    receipt = Receipt(learner=0, incarnation=1, round=0)
    link.send(receipt, bytes(1_000_000))
    # What is on its way counts from when it was sent, which is a matter of
    # another thread; so time passes until it has been.
    while not isinstance(event := link.receive(0.01), LinkDown):
      now[0] += 100.0
      link.send(HELLO)
    assert 'took no payload bytes for 201.0 s' in event.reason
    assert event.dropped == (receipt,)
  finally:
    link.close(0)
    faulty_proxy.release()
    endpoint.close(0)


def test_an_address_outside_needs_tls():
  with pytest.raises(ValueError, match=r'10\.0\.0\.1:8470 is not loopback'):
    GrpcLink('10.0.0.1:8470')
  GrpcLink('10.0.0.1:8470', security=SecurityOptions(insecure=True))


SYNCER = """
import sys
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.options import TransportOptions
endpoint = GrpcEndpoint('127.0.0.1:0', TransportOptions())
endpoint.start(lambda *_: None, lambda *_: None)
print(endpoint.address, flush=True)
sys.stdin.read()
"""


def test_a_frozen_syncer_is_noticed_and_found_again():
  # 0.2 s until it is asked, 0.2 s until that is given up.
  with subprocess.Popen(
    [sys.executable, '-c', SYNCER],
    cwd=pathlib.Path(__file__).parents[2],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as syncer:
    try:
      assert syncer.stdout is not None
      with started(syncer.stdout.readline().strip()) as link:
        assert link.receive(DEADLINE_SECONDS) == LinkUp()
        os.kill(syncer.pid, signal.SIGSTOP)
        assert down(link).reason
        os.kill(syncer.pid, signal.SIGCONT)
        while link.receive(DEADLINE_SECONDS) != LinkUp():
          pass
    finally:
      syncer.kill()


def test_needs_no_jax_and_says_nothing_by_itself():
  with silent_server() as address:
    pass
  script = f"""
import subprocess, sys
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.grpc_link import GrpcLink
assert 'jax' not in sys.modules
link = GrpcLink('{address}')
link.start()
endpoint = GrpcEndpoint('127.0.0.1:0')
endpoint.start(lambda *_: None, lambda *_: None)
try:
  GrpcEndpoint(endpoint.address).start(lambda *_: None, lambda *_: None)
except OSError:
  print('in use')
print(type(link.receive(20)).__name__)
subprocess.run([sys.executable, '-c', ''], check=True, preexec_fn=int)
link.close(0)
endpoint.close(0)
"""
  done = subprocess.run(
    [sys.executable, '-c', script],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    check=False,
  )
  assert (done.stdout, done.stderr) == ('in use\nLinkDown\n', '')
