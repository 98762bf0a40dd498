"""Whoever is not of the run is kept out, while the run goes on undisturbed."""

import contextlib
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import threading

import grpc
import pytest

from decoupled_diloco.protocol.messages import Hello, Receipt
from decoupled_diloco.transport import grpc_settings
from decoupled_diloco.transport.addresses import split_address
from decoupled_diloco.transport.base import LinkDown, LinkUp, Parcel
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.grpc_link import GrpcLink
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.security import SecurityOptions

DEADLINE_SECONDS = 30.0
ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = TransportOptions(connect_seconds=1.0)
HELLO = Hello(learner=0, layout='layout')

pytestmark = pytest.mark.skipif(
  shutil.which('openssl') is None, reason='openssl makes the certificates'
)


def make_certificates(folder: pathlib.Path, days: int = 2) -> pathlib.Path:
  subprocess.run(
    [ROOT / 'scripts' / 'make_certificates', folder],
    env={**os.environ, 'DAYS': str(days)},
    check=True,
    capture_output=True,
  )
  return folder


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  """Certificates of the run, and others."""
  folder = tmp_path_factory.mktemp('certificates')
  make_certificates(folder / 'run')
  make_certificates(folder / 'stranger')
  # Signed by the run's own authority, but not valid any more.
  expired = folder / 'expired'
  shutil.copytree(folder / 'run', expired)
  for command in (
    'openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes '
    '-keyout learner.key -out own.csr -subj /CN=learner',
    'openssl x509 -req -in own.csr -out learner.pem -days -1 '
    '-CA ca.pem -CAkey ca.key -CAcreateserial',
  ):
    subprocess.run(
      command.split(), cwd=expired, check=True, capture_output=True
    )
  return folder


def security(folder: pathlib.Path, role: str, token: str = 'secret'):
  return SecurityOptions(
    tls_certificate=str(folder / f'{role}.pem'),
    tls_key=str(folder / f'{role}.key'),
    tls_authority=str(folder / 'ca.pem'),
    tls_server_name='localhost',
    run_token=token,
  )


class Run:
  """An endpoint, and a learner that talks to it all the time."""

  def __init__(self, folder: pathlib.Path):
    self.heard = []
    self.endpoint = GrpcEndpoint(
      '127.0.0.1:0', OPTIONS, security(folder / 'run', 'syncer')
    )
    self.endpoint.start(self._answer, lambda peer, reason: None)
    self.learner = GrpcLink(
      self.endpoint.address, OPTIONS, security(folder / 'run', 'learner')
    )
    self.learner.start()
    assert self.learner.receive(DEADLINE_SECONDS) == LinkUp()

  def _answer(self, peer, parcel):
    self.heard.append(parcel.message)
    self.endpoint.send(peer, parcel.message)

  def check(self):
    """The learner is answered, and nobody else was ever heard."""
    before = len(self.heard)
    message = Receipt(0, 1, before)
    self.learner.send(message)
    answer = self.learner.receive(DEADLINE_SECONDS)
    assert isinstance(answer, Parcel)
    assert answer.message == message
    assert self.heard[before:] == [message]

  def close(self):
    self.learner.close(0)
    self.endpoint.close(0)


@pytest.fixture
def run(folder):
  """Undisturbed before and after whatever happens to it."""
  with contextlib.closing(Run(folder)) as run:
    run.check()
    yield run
    run.check()


def intruder(run: Run, options: SecurityOptions) -> str:
  """What somebody with these options is told."""
  link = GrpcLink(run.endpoint.address, OPTIONS, options)
  with contextlib.closing(contextlib.ExitStack()) as stack:
    stack.callback(link.close, 0)
    link.start()
    link.send(HELLO)
    event = link.receive(DEADLINE_SECONDS)
    assert isinstance(event, LinkDown)
    return event.reason


def test_without_a_certificate(run, folder):
  authority = (folder / 'run' / 'ca.pem').read_bytes()
  credentials = grpc.ssl_channel_credentials(root_certificates=authority)
  arguments = [('grpc.ssl_target_name_override', 'localhost')]
  with grpc.secure_channel(
    run.endpoint.address, credentials, arguments
  ) as channel:
    call = channel.stream_stream(grpc_settings.METHOD_PATH)(
      iter(()), metadata=(('run-token', 'secret'),), timeout=DEADLINE_SECONDS
    )
    with pytest.raises(grpc.RpcError):
      list(call)
    assert call.code() is grpc.StatusCode.UNAVAILABLE


def test_of_a_foreign_authority(run, folder):
  intruder(run, security(folder / 'stranger', 'learner'))


def test_who_trusts_us_but_is_of_a_foreign_authority(run, folder, tmp_path):
  mixed = tmp_path / 'mixed'
  shutil.copytree(folder / 'stranger', mixed)
  shutil.copy(folder / 'run' / 'ca.pem', mixed / 'ca.pem')
  intruder(run, security(mixed, 'learner'))


def test_with_an_expired_certificate(run, folder):
  intruder(run, security(folder / 'expired', 'learner'))


@pytest.mark.parametrize('token', ['', 'wrong', 'secre', 'secrets'])
def test_with_a_wrong_token(run, folder, token):
  reason = intruder(run, security(folder / 'run', 'learner', token))
  assert 'run_token' in reason
  assert 'secret' not in reason


def test_plain_text_to_a_port_with_tls(run):
  intruder(run, SecurityOptions(run_token='secret'))
  with socket.create_connection(split_address(run.endpoint.address)) as plain:
    plain.sendall(b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n')
    plain.settimeout(DEADLINE_SECONDS)
    with contextlib.suppress(ConnectionResetError):
      assert b'200' not in plain.recv(1000)


def is_closed(connection: socket.socket) -> bool:
  """Waits until the other side has closed it."""
  connection.settimeout(DEADLINE_SECONDS)
  try:
    while connection.recv(1000):
      pass
  except ConnectionError:
    return True
  except (TimeoutError, ssl.SSLError):
    return False
  return True


def test_slow_ones_do_not_keep_their_place(run, folder):
  """Some say nothing, some one byte at a time, some stop after TLS."""
  address = split_address(run.endpoint.address)
  own = security(folder / 'run', 'learner')
  context = ssl.create_default_context(cafile=own.tls_authority)
  context.load_cert_chain(own.tls_certificate, own.tls_key)
  context.set_alpn_protocols(['h2'])
  with contextlib.ExitStack() as stack:
    silent = [
      stack.enter_context(socket.create_connection(address)) for _ in range(40)
    ]
    dripping = [
      stack.enter_context(socket.create_connection(address)) for _ in range(10)
    ]
    greeted = []
    for _ in range(10):
      plain = stack.enter_context(socket.create_connection(address))
      greeted.append(
        stack.enter_context(
          context.wrap_socket(plain, server_hostname='localhost')
        )
      )
    is_over = threading.Event()

    def drip():
      # The beginning of a TLS record that never ends.
      for byte in b'\x16\x03\x01\x10\x00' + b'\x01' * 1000:
        for connection in dripping:
          with contextlib.suppress(OSError):
            connection.send(bytes([byte]))
        if is_over.wait(0.05):
          return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
      # While all of them are there, and whenever one of them is gone.
      run.check()
      for connection in (*silent, *dripping, *greeted):
        assert is_closed(connection)
        run.check()
    finally:
      is_over.set()
      thread.join()


def test_a_token_in_a_file(folder, tmp_path):
  path = tmp_path / 'token'
  path.write_text('secret\n')
  from_file = SecurityOptions(run_token_file=str(path))
  assert from_file.call_metadata() == (('run-token', 'secret'),)
  assert 'secret' not in repr(from_file)
  assert SecurityOptions(run_token='secret').is_admitted(
    from_file.call_metadata()
  )


@pytest.mark.parametrize('content', [None, '', '\n', 'gehäuse\n', ' \nsecret'])
def test_a_token_file_that_holds_none(tmp_path, content):
  path = tmp_path / 'token'
  if content is not None:
    path.write_text(content)
  options = SecurityOptions(run_token_file=str(path))
  # Before anybody has connected, so that nobody waits for it in vain.
  for read in (
    options.check_token,
    lambda: GrpcEndpoint('127.0.0.1:0', security=options),
    lambda: GrpcLink('127.0.0.1:1', security=options),
  ):
    with pytest.raises(ValueError, match=r'run_token_file=.* must'):
      read()


def test_a_token_that_was_checked_is_not_read_again(tmp_path):
  path = tmp_path / 'token'
  path.write_text('secret\n')
  options = SecurityOptions(run_token_file=str(path))
  options.check_token()
  path.unlink()
  assert options.is_admitted((('run-token', 'secret'),))
  SecurityOptions().check_token()  # There is none, and none is needed.


def test_both_tokens():
  with pytest.raises(ValueError, match='must not both be given'):
    SecurityOptions(run_token='a', run_token_file='b')


@pytest.mark.parametrize(
  ('address', 'options', 'says'),
  [
    ('127.0.0.1:1', SecurityOptions(), ''),
    ('0.0.0.0:1', SecurityOptions(insecure=True), 'not even a run_token'),
    ('0.0.0.0:1', SecurityOptions(insecure=True, run_token='a'), 'change it.'),
  ],
)
def test_an_open_run_is_loud(address, options, says):
  warning = options.warning(address)
  assert warning.endswith(says if says != 'not even a run_token' else '.')
  assert says in warning
  assert bool(says) == warning.startswith('WARNING')
