"""What is particular to the endpoint over gRPC."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading

import grpc
import pytest

from decoupled_diloco.protocol.messages import (
  Contribution,
  Hello,
  Receipt,
  RoundOpened,
  RunEnded,
)
from decoupled_diloco.transport import grpc_settings, wire
from decoupled_diloco.transport.base import LinkDown, LinkUp, Parcel
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.grpc_link import GrpcLink
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.security import SecurityOptions

DEADLINE_SECONDS = 30
HELLO = Hello(learner=0, layout='layout')
QUICK = TransportOptions(
  chunk_bytes=32 << 10,
  window_bytes=64 << 10,
  max_message_bytes=4 << 10,
  control_queue=4,
  backoff_initial_seconds=0.01,
  backoff_maximum_seconds=0.05,
  bulk_delay_seconds=0.1,
  disconnect_seconds=0.2,
  keepalive_seconds=0.2,
  ping_timeout_seconds=0.2,
  stall_seconds=0.5,
)
PATIENT = TransportOptions(
  max_message_bytes=4 << 10, control_queue=4, disconnect_seconds=10.0
)


class Running:
  """An endpoint whose arrivals are queued."""

  def __init__(self, options=PATIENT, on_parcel=None, **arguments):
    self.arrivals = queue.Queue()
    self.endpoint = GrpcEndpoint('127.0.0.1:0', options, **arguments)
    self.endpoint.start(
      on_parcel or (lambda peer, parcel: self.arrivals.put((peer, parcel))),
      lambda peer, reason: self.arrivals.put((peer, reason)),
    )
    self._links = []

  def arrival(self):
    return self.arrivals.get(timeout=DEADLINE_SECONDS)

  def link(self, options=QUICK, security=None, address=None):
    link = GrpcLink(address or self.endpoint.address, options, security)
    self._links.append(link)
    link.start()
    return link

  def close(self):
    for link in self._links:
      link.close(0)
    self.endpoint.close(0)


@pytest.fixture
def run():
  """Makes endpoints, and closes them."""
  with contextlib.ExitStack() as stack:

    def make(*arguments, **named):
      return stack.enter_context(
        contextlib.closing(Running(*arguments, **named))
      )

    yield make


def talk(address, packets):
  """Sends these bytes as packets; returns how the syncer ends the call."""
  more = threading.Event()

  def requests():
    yield from packets
    more.wait(DEADLINE_SECONDS)

  with grpc.insecure_channel(address) as channel:
    call = channel.stream_stream(grpc_settings.METHOD_PATH)(requests())
    with pytest.raises(grpc.RpcError):
      list(call)
    more.set()
    return call.code(), call.details()


@pytest.mark.parametrize(
  ('packet', 'match'),
  [
    (b'\xff\xff', 'no packet'),
    (b'', 'no frames'),
    (wire.encode_frame(wire.ChunkFrame(1, b'a')), 'of payload 1'),
    (wire.encode_frame(wire.AcknowledgementFrame(1)), 'acknowledgement of 1'),
    (
      wire.encode_frame(wire.EnvelopeFrame(RunEnded(reason='x' * 5000))),
      'max_message_bytes=4096',
    ),
  ],
)
def test_a_peer_that_breaks_the_rules_is_told_and_no_other(run, packet, match):
  running = run()
  other = running.link()
  assert other.receive(DEADLINE_SECONDS) == LinkUp()
  other.send(HELLO)
  _, parcel = running.arrival()
  assert parcel.message == HELLO

  code, details = talk(running.endpoint.address, [packet])
  assert code is grpc.StatusCode.ABORTED
  assert 'sent what it must not' in details
  assert match in details
  _, reason = running.arrival()
  assert reason == details

  other.send(HELLO)
  assert running.arrival()[1].message == HELLO


def test_a_packet_beyond_all_measure_is_refused_by_grpc(run):
  running = run()
  code, details = talk(running.endpoint.address, [bytes(5 << 20)])
  assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
  assert 'larger than max' in details
  assert isinstance(running.arrival()[1], str)


def test_no_more_than_max_peers(run):
  running = run(max_peers=1)
  first = running.link()
  assert first.receive(DEADLINE_SECONDS) == LinkUp()
  second = running.link()
  event = second.receive(DEADLINE_SECONDS)
  assert isinstance(event, LinkDown)
  assert 'max_peers=1' in event.reason
  # The place is free as soon as the first one is gone.
  first.close(DEADLINE_SECONDS)
  assert second.receive(DEADLINE_SECONDS) == LinkUp()


def test_who_only_connects_does_not_keep_a_place(run):
  running = run(dataclasses.replace(PATIENT, connect_seconds=0.2), max_peers=1)
  silent = running.link()
  assert silent.receive(DEADLINE_SECONDS) == LinkUp()
  event = silent.receive(DEADLINE_SECONDS)
  assert isinstance(event, LinkDown)
  assert 'no message within connect_seconds=0.2' in event.reason
  silent.close(DEADLINE_SECONDS)
  other = running.link()
  assert other.receive(DEADLINE_SECONDS) == LinkUp()
  other.send(HELLO)
  # Who has spoken may be silent: liveness is the protocol's affair.
  assert other.receive(0.5) is None


@pytest.mark.parametrize('token', ['', 'wrong'])
def test_a_learner_of_another_run_is_not_let_in(run, token):
  running = run(security=SecurityOptions(run_token='right'))
  wrong = running.link(security=SecurityOptions(run_token=token))
  event = wrong.receive(DEADLINE_SECONDS)
  assert isinstance(event, LinkDown)
  assert 'run_token' in event.reason
  right = running.link(security=SecurityOptions(run_token='right'))
  assert right.receive(DEADLINE_SECONDS) == LinkUp()


def test_a_parcel_that_cannot_be_taken_in_costs_the_peer_only(run, caplog):
  taken = queue.Queue()

  def on_parcel(peer, parcel):
    if isinstance(parcel.message, Receipt):
      raise RuntimeError('no room')
    taken.put(peer)

  running = run(on_parcel=on_parcel)
  link = running.link()
  assert link.receive(DEADLINE_SECONDS) == LinkUp()
  with caplog.at_level(logging.ERROR):
    link.send(Receipt(learner=0, incarnation=1, round=0))
    peer, reason = running.arrival()
  assert 'could not take in a parcel' in reason
  assert 'no room' in caplog.text
  event = link.receive(DEADLINE_SECONDS)
  assert isinstance(event, LinkDown)
  assert event.reason.endswith(reason)
  assert link.receive(DEADLINE_SECONDS) == LinkUp()
  link.send(HELLO)
  assert taken.get(timeout=DEADLINE_SECONDS) > peer


@pytest.mark.parametrize('kind', ['reader', 'timer'])
def test_a_host_without_threads_leaves_no_place_taken(
  run, monkeypatch, caplog, kind
):
  start = threading.Thread.start
  refused = []

  def start_or_refuse(thread):
    is_it = (
      thread.name.startswith('endpoint-reader')
      if kind == 'reader'
      else isinstance(thread, threading.Timer)
      and threading.current_thread().name.startswith('endpoint-reader')
    )
    if is_it and not refused:
      refused.append(thread)
      raise RuntimeError("can't start new thread")
    start(thread)

  monkeypatch.setattr(threading.Thread, 'start', start_or_refuse)
  running = run(
    max_peers=1,
    on_parcel=lambda peer, parcel: running.endpoint.send(peer, parcel.message),
  )
  link = running.link()
  while not isinstance(event := link.receive(DEADLINE_SECONDS), Parcel):
    assert event is not None
    if event == LinkUp():
      link.send(HELLO)
  assert event.message == HELLO
  assert refused
  assert "can't start new thread" in caplog.text


def test_closing_waits_for_who_hears_of_a_loss():
  order, is_lost, goes_on = [], threading.Event(), threading.Event()

  def on_lost(peer, reason):
    is_lost.set()
    goes_on.wait(0.3)  # Nobody sets it: this only takes its time.
    order.append('heard')

  endpoint = GrpcEndpoint('127.0.0.1:0', PATIENT)
  endpoint.start(lambda *_: None, on_lost)
  link = GrpcLink(endpoint.address, PATIENT)
  link.start()
  assert link.receive(DEADLINE_SECONDS) == LinkUp()
  link.close(0)
  assert is_lost.wait(DEADLINE_SECONDS)
  endpoint.close(0)
  order.append('closed')
  assert order == ['heard', 'closed']


def test_a_peer_that_takes_no_control_messages_is_disconnected(
  run, faulty_proxy
):
  running = run(
    TransportOptions(
      control_queue=4, max_message_bytes=4 << 10, disconnect_seconds=0.2
    )
  )
  faulty_proxy.lead_to(running.endpoint.address)
  link = running.link(PATIENT, address=faulty_proxy.address)
  assert link.receive(DEADLINE_SECONDS) == LinkUp()
  link.send(HELLO)
  peer, _ = running.arrival()
  faulty_proxy.hold()
  # gRPC and the sockets take some, then the queue does, then it is enough.
  while running.endpoint.send(peer, RunEnded(reason='x' * 4000)):
    pass
  assert running.arrival() == (
    peer,
    'Too many control messages are waiting to be sent.',
  )


def test_a_learner_that_takes_no_payloads_is_disconnected(run):
  running = run(QUICK)
  link = running.link(
    TransportOptions(
      chunk_bytes=32 << 10, window_bytes=64 << 10, receive_queue=1
    )
  )
  assert link.receive(DEADLINE_SECONDS) == LinkUp()
  link.send(HELLO)
  peer, _ = running.arrival()
  # The learner does not look. It takes one payload, and of the second no more
  # than the window, though it still answers pings.
  for round_ in range(2):
    assert running.endpoint.send(
      peer, RoundOpened(round=round_, fragment=0), bytes(1_000_000)
    )
  _, reason = running.arrival()
  assert 'took no payload bytes for 0.5 s' in reason


def test_memory_is_bounded_while_on_parcel_takes_its_time(run):
  gate = threading.Event()
  entered = queue.Queue()

  def on_parcel(peer, parcel):
    entered.put(parcel)
    gate.wait(DEADLINE_SECONDS)

  running = run(on_parcel=on_parcel)
  options = TransportOptions(chunk_bytes=32 << 10, window_bytes=256 << 10)
  link = running.link(options)
  assert link.receive(DEADLINE_SECONDS) == LinkUp()
  link.send(HELLO)
  entered.get(timeout=DEADLINE_SECONDS)
  contribution = Contribution(
    learner=0,
    incarnation=1,
    round=0,
    fragment=0,
    base_version=0,
    steps=1,
    tokens=1,
    total_steps=1,
    total_tokens=1,
    step_seconds=0.1,
  )
  link.send(contribution, bytes(4_000_000))
  # What comes down is not held up, and shows that time passes.
  for round_ in range(50):
    assert running.endpoint.send(1, RoundOpened(round=round_, fragment=0))
    parcel = link.receive(DEADLINE_SECONDS)
    assert parcel.message == RoundOpened(round=round_, fragment=0)
  assert link.bytes_sent < 1.01 * (256 << 10)
  gate.set()
  parcel = entered.get(timeout=DEADLINE_SECONDS)
  assert (parcel.message, len(parcel.payload)) == (contribution, 4_000_000)


LEARNER = """
import sys
from decoupled_diloco.protocol.messages import Hello
from decoupled_diloco.transport.base import LinkUp
from decoupled_diloco.transport.grpc_link import GrpcLink
assert 'jax' not in sys.modules
link = GrpcLink(sys.argv[1])
link.start()
while True:
  if link.receive(1.0) == LinkUp():
    link.send(Hello(learner=0, layout='layout'))
"""


def test_a_frozen_learner_is_noticed_and_comes_back(run):
  # 0.2 s until it is asked, 0.2 s until that is given up.
  running = run(QUICK)
  with subprocess.Popen(
    [sys.executable, '-c', LEARNER, running.endpoint.address],
    cwd=pathlib.Path(__file__).parents[2],
  ) as learner:
    try:
      peer, parcel = running.arrival()
      assert parcel.message == HELLO
      os.kill(learner.pid, signal.SIGSTOP)
      assert running.arrival() == (peer, 'The connection was lost.')
      os.kill(learner.pid, signal.SIGCONT)
      new_peer, parcel = running.arrival()
      assert new_peer > peer
      assert parcel.message == HELLO
    finally:
      learner.kill()


def test_an_address_outside_needs_tls():
  with pytest.raises(ValueError, match=r'0\.0\.0\.0:0 is not loopback'):
    GrpcEndpoint('0.0.0.0:0')


def test_an_address_of_another_host():
  # 192.0.2.0/24 is for documentation, so it is nobody's.
  endpoint = GrpcEndpoint(
    '192.0.2.1:0', security=SecurityOptions(insecure=True)
  )
  with pytest.raises(OSError, match='must be free and of this host'):
    endpoint.start(lambda *_: None, lambda *_: None)
  endpoint.close(0)
