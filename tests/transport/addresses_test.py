"""host:port."""

import pytest

from decoupled_diloco.transport.addresses import (
  is_loopback,
  join_address,
  local_host_towards,
  split_address,
)


@pytest.mark.parametrize(
  ('address', 'host', 'port'),
  [
    ('127.0.0.1:0', '127.0.0.1', 0),
    ('[::1]:8470', '::1', 8470),
    ('syncer.example.org:65535', 'syncer.example.org', 65535),
  ],
)
def test_there_and_back(address, host, port):
  assert split_address(address) == (host, port)
  assert join_address(host, port) == address


@pytest.mark.parametrize(
  'address', ['', 'host', ':1', 'host:', 'host:x', '::1:80', 'host:65536']
)
def test_what_is_no_address(address):
  with pytest.raises(ValueError, match='must be host:port'):
    split_address(address)


def test_loopback():
  assert is_loopback('127.0.0.2')
  assert is_loopback('::1')
  assert is_loopback('localhost')
  assert not is_loopback('192.0.2.1')
  assert not is_loopback('localhost.example.org')


def test_this_host_as_others_see_it():
  assert local_host_towards('127.0.0.1') == '127.0.0.1'
