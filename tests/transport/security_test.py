"""TLS on both sides, and who is let in."""

import pathlib
import shutil
import subprocess

import pytest

from decoupled_diloco.protocol.messages import Hello
from decoupled_diloco.transport.base import LinkDown, LinkUp, Parcel
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.grpc_link import GrpcLink
from decoupled_diloco.transport.security import SecurityOptions

DEADLINE_SECONDS = 30


@pytest.mark.parametrize(
  'address', ['127.0.0.1:0', '127.8.8.8:1', '[::1]:0', 'localhost:8470']
)
def test_loopback_needs_no_tls(address):
  SecurityOptions().check_address(address)


@pytest.mark.parametrize(
  'address',
  ['0.0.0.0:0', '[::]:0', '10.0.0.1:1', 'example.org:1', '[::ffff:10.0.0.1]:1'],
)
def test_other_addresses_need_tls_or_a_word(address):
  with pytest.raises(ValueError, match='is not loopback, so it needs TLS'):
    SecurityOptions().check_address(address)
  SecurityOptions(insecure=True).check_address(address)
  SecurityOptions(
    tls_certificate='a', tls_key='b', tls_authority='c'
  ).check_address(address)


def test_tls_needs_all_of_it():
  with pytest.raises(ValueError, match='tls_key, tls_authority must be given'):
    SecurityOptions(tls_certificate='a')


def test_files_must_be_there():
  options = SecurityOptions(
    tls_certificate='/nowhere/a', tls_key='/nowhere/b', tls_authority='c'
  )
  with pytest.raises(ValueError, match='tls_certificate=/nowhere/a must be'):
    options.server_credentials()


def test_files_must_be_what_they_should_be(tmp_path):
  path = tmp_path / 'file.pem'
  path.write_text('not a certificate')
  options = SecurityOptions(
    tls_certificate=str(path), tls_key=str(path), tls_authority=str(path)
  )
  for make in (options.server_credentials, options.channel_credentials):
    with pytest.raises(ValueError, match='must be PEM files of one'):
      make()


def test_the_token_stays_out_of_sight():
  assert 'secret' not in repr(SecurityOptions(run_token='secret'))
  with pytest.raises(ValueError, match='ASCII'):
    SecurityOptions(run_token='geheimnis\n')


def test_the_token_must_be_the_same():
  ours = SecurityOptions(run_token='secret')
  assert ours.is_admitted(ours.call_metadata())
  assert not ours.is_admitted(SecurityOptions().call_metadata())
  assert not ours.is_admitted((('run-token', b'other'),))
  assert SecurityOptions().is_admitted(())
  assert not SecurityOptions().is_admitted(ours.call_metadata())


def openssl(directory, *arguments):
  subprocess.run(
    ['openssl', *arguments], cwd=directory, check=True, capture_output=True
  )


def make_run(directory: pathlib.Path) -> SecurityOptions:
  """An authority, and a certificate that it has signed, for localhost."""
  directory.mkdir()
  new_key = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes']
  openssl(
    directory,
    *('req', '-x509', *new_key, '-keyout', 'ca.key', '-out', 'ca.pem'),
    *('-subj', '/CN=authority', '-days', '2'),
  )
  openssl(
    directory,
    *('req', *new_key, '-keyout', 'own.key', '-out', 'own.csr'),
    *('-subj', '/CN=localhost'),
  )
  (directory / 'extensions').write_text('subjectAltName=DNS:localhost\n')
  openssl(
    directory,
    *('x509', '-req', '-in', 'own.csr', '-out', 'own.pem', '-days', '2'),
    *('-CA', 'ca.pem', '-CAkey', 'ca.key', '-CAcreateserial'),
    *('-extfile', 'extensions'),
  )
  return SecurityOptions(
    tls_certificate=str(directory / 'own.pem'),
    tls_key=str(directory / 'own.key'),
    tls_authority=str(directory / 'ca.pem'),
    tls_server_name='localhost',
    run_token='secret',
  )


@pytest.mark.skipif(
  shutil.which('openssl') is None, reason='openssl makes the certificates'
)
def test_only_who_is_of_the_run_gets_through(tmp_path):
  run = make_run(tmp_path / 'run')
  stranger = make_run(tmp_path / 'stranger')
  hello = Hello(learner=0, layout='layout')
  endpoint = GrpcEndpoint('127.0.0.1:0', security=run)
  endpoint.start(
    lambda peer, parcel: endpoint.send(peer, hello), lambda *_: None
  )
  try:
    link = GrpcLink(endpoint.address, security=run)
    link.start()
    assert link.receive(DEADLINE_SECONDS) == LinkUp()
    link.send(hello)
    assert isinstance(link.receive(DEADLINE_SECONDS), Parcel)
    link.close(0)
    # One without TLS but with the token, and one of another authority.
    for other in (SecurityOptions(run_token='secret'), stranger):
      link = GrpcLink(endpoint.address, security=other)
      link.start()
      assert isinstance(link.receive(DEADLINE_SECONDS), LinkDown)
      link.close(0)
  finally:
    endpoint.close(0)
