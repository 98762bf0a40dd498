"""Where somebody can be reached: host:port, and whose host that is."""

import ipaddress
import socket


def split_address(address: str) -> tuple[str, int]:
  """Host and port of 'host:port' or '[v6-host]:port'.

  >>> split_address('[::1]:8470')
  ('::1', 8470)

  Raises:
    ValueError: if it is not of that form.
  """
  host, colon, port = address.rpartition(':')
  is_bracketed = host.startswith('[') and host.endswith(']')
  host = host.removeprefix('[').removesuffix(']') if is_bracketed else host
  if (
    not (colon and host and port.isascii() and port.isdigit())
    or int(port) > 65535
    or (':' in host and not is_bracketed)
  ):
    raise ValueError(
      f'address={address!r} must be host:port with a port up to 65535, such as '
      '10.0.0.2:8470 or [::1]:8470.'
    )
  return host, int(port)


def join_address(host: str, port: int) -> str:
  """The inverse of `split_address`.

  >>> join_address('::1', 8470)
  '[::1]:8470'
  """
  return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def is_loopback(host: str) -> bool:
  """Whether only this host itself is reached under this name or number."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'


def local_host_towards(remote_host: str) -> str:
  """The number of this host on the interface that leads to the other one.

  That is the one to give to others: a host with several interfaces would else
  easily name the slow one. Nothing is sent.

  Raises:
    OSError: if there is no way to that host.
  """
  family, _, _, _, remote = socket.getaddrinfo(
    remote_host, 9, type=socket.SOCK_DGRAM
  )[0]
  with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(remote)
    return probe.getsockname()[0]
