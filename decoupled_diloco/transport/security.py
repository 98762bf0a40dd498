"""Who may connect: TLS on both sides, and a token that the whole run shares."""

import dataclasses
import functools
import hmac
import pathlib
import ssl
from collections.abc import Iterable

import grpc

from decoupled_diloco.transport.addresses import is_loopback, split_address

_TOKEN_KEY = 'run-token'


@dataclasses.dataclass(frozen=True)
class SecurityOptions:
  """Whom a process believes, and how it proves itself.

  Attributes:
    insecure: allow addresses other than loopback without TLS. Everybody on the
      network can then read the model and, knowing the token, change it.
    tls_certificate: PEM file with this process's certificate.
    tls_key: PEM file with its private key.
    tls_authority: PEM file with the authority that must have signed the other
      side's certificate. With these three, TLS is used, and each side checks
      the other.
    tls_server_name: the name that the syncer's certificate is for, where it is
      not the host of its address.
    run_token: a secret that learners and syncer of a run share, so that no
      learner joins the wrong run; '' for none. Everybody on the machine can see
      it on a command line, so rather give it in a file.
    run_token_file: a file with the run_token in its first line.
  """

  insecure: bool = False
  tls_certificate: str = ''
  tls_key: str = ''
  tls_authority: str = ''
  tls_server_name: str = ''
  run_token: str = dataclasses.field(default='', repr=False)
  run_token_file: str = ''

  def __post_init__(self):
    files = {
      name: getattr(self, name)
      for name in ('tls_certificate', 'tls_key', 'tls_authority')
    }
    missing = [name for name, path in files.items() if not path]
    if 0 < len(missing) < len(files):
      raise ValueError(
        f'{", ".join(missing)} must be given too: TLS needs all of '
        f'{", ".join(files)}, or none.'
      )
    if self.run_token and self.run_token_file:
      raise ValueError(
        'run_token and run_token_file must not both be given; keep the file.'
      )
    if not _is_token(self.run_token):
      raise ValueError('run_token must be of printable ASCII characters.')

  @property
  def has_tls(self) -> bool:
    """Whether connections are encrypted, and both sides proven."""
    return bool(self.tls_certificate)

  def check_address(self, address: str):
    """Refuses to let a run go unprotected over a network.

    Raises:
      ValueError: if there is no TLS, the address is not of this host alone, and
        `insecure` does not say that this is meant.
    """
    host, _ = split_address(address)
    if not (self.has_tls or self.insecure or is_loopback(host)):
      raise ValueError(
        f'address={address} is not loopback, so it needs TLS: set '
        'tls_certificate, tls_key and tls_authority. On a network that you '
        'trust altogether, set insecure=True.'
      )

  def server_credentials(self) -> grpc.ServerCredentials | None:
    """For the syncer; None without TLS.

    Raises:
      ValueError: if the files cannot be read, or are not what they should be.
    """
    if not self.has_tls:
      return None
    certificate, key, authority = self._read_files()
    return grpc.ssl_server_credentials(
      [(key, certificate)],
      root_certificates=authority,
      require_client_auth=True,
    )

  def channel_credentials(self) -> grpc.ChannelCredentials | None:
    """For a learner; None without TLS. Raises as `server_credentials`."""
    if not self.has_tls:
      return None
    certificate, key, authority = self._read_files()
    return grpc.ssl_channel_credentials(
      root_certificates=authority,
      private_key=key,
      certificate_chain=certificate,
    )

  def check_token(self):
    """Reads the token now, so that a bad file stops the start of a run.

    Otherwise it would be read when the first learner connects.

    Raises:
      ValueError: if the file cannot be read, or holds none.
    """
    _ = self.token

  @functools.cached_property
  def token(self) -> str:
    """The run's token, wherever it was given; '' for none.

    Raises:
      ValueError: if the file cannot be read, or holds none.
    """
    if not self.run_token_file:
      return self.run_token
    path = pathlib.Path(self.run_token_file)
    try:
      first, *_ = [*path.read_text().splitlines(), '']
    except (OSError, UnicodeError) as error:
      why = getattr(error, 'strerror', None) or 'it is no text'
      raise ValueError(
        f'run_token_file={path} must be a file that can be read: {why}.'
      ) from error
    if not first.strip() or not _is_token(first.strip()):
      raise ValueError(
        f'run_token_file={path} must hold the token in its first line, in '
        'printable ASCII characters.'
      )
    return first.strip()

  def call_metadata(self) -> tuple[tuple[str, str], ...]:
    """What a learner shows at the door."""
    return ((_TOKEN_KEY, self.token),) if self.token else ()

  def is_admitted(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether a learner that shows this is one of the run."""
    shown = next((value for key, value in metadata if key == _TOKEN_KEY), '')
    if isinstance(shown, str):
      shown = shown.encode()
    return hmac.compare_digest(shown, self.token.encode())

  def warning(self, address: str) -> str:
    """What people must know of a run that is open to others; '' if nothing."""
    host, _ = split_address(address)
    if self.has_tls or is_loopback(host):
      return ''
    return (
      f'WARNING: insecure=True, and {address} can be reached by others. '
      'Whoever is on this network can read the model, and change it'
      + ('.' if self.token else ': there is not even a run_token.')
    )

  def _read_files(self) -> tuple[bytes, bytes, bytes]:
    """Certificate, key and authority; gRPC would not say what is wrong."""
    names = ('tls_certificate', 'tls_key', 'tls_authority')
    contents = []
    for name in names:
      path = pathlib.Path(getattr(self, name))
      try:
        contents.append(path.read_bytes())
      except OSError as error:
        raise ValueError(
          f'{name}={path} must be a PEM file that can be read: '
          f'{error.strerror}.'
        ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
      context.load_cert_chain(self.tls_certificate, self.tls_key, password='')
      context.load_verify_locations(self.tls_authority)
    except ssl.SSLError as error:
      raise ValueError(
        f'tls_certificate={self.tls_certificate} and tls_key={self.tls_key} '
        'must be PEM files of one certificate and its key without a password, '
        f'tls_authority={self.tls_authority} one of certificates: {error}.'
      ) from error
    certificate, key, authority = contents
    return certificate, key, authority


def _is_token(text: str) -> bool:
  return text.isascii() and text.isprintable()
