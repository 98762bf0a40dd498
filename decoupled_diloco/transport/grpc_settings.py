"""What both sides of the gRPC transport must agree on, and how it is tuned."""

from decoupled_diloco.transport import wire_pb2
from decoupled_diloco.transport.options import (
  MAX_PACKET_BYTES,
  TransportOptions,
)

_SERVICE = wire_pb2.DESCRIPTOR.services_by_name['Transport']
SERVICE = _SERVICE.full_name
METHOD = _SERVICE.methods_by_name['Exchange'].name
METHOD_PATH = f'/{SERVICE}/{METHOD}'

# The syncer shows this when it takes a connection: it is our server, and our
# kind of packets.
GREETING = ('decoupled-diloco-wire', '2')

Arguments = list[tuple[str, int | str]]


def _common_arguments(options: TransportOptions) -> Arguments:
  ping_timeout = round(1000 * options.ping_timeout_seconds)
  return [
    ('grpc.max_receive_message_length', MAX_PACKET_BYTES),
    ('grpc.max_send_message_length', MAX_PACKET_BYTES),
    ('grpc.keepalive_time_ms', round(1000 * options.keepalive_seconds)),
    ('grpc.keepalive_timeout_ms', ping_timeout),
    # Without it, a ping may take a minute whatever the line above says.
    ('grpc.http2.ping_timeout_ms', ping_timeout),
    ('grpc.keepalive_permit_without_calls', 1),
    # A waiting learner sends little; by default pings stop after two.
    ('grpc.http2.max_pings_without_data', 0),
  ]


def server_arguments(options: TransportOptions) -> Arguments:
  """Channel arguments of the syncer."""
  return [
    *_common_arguments(options),
    # Learners may ping as often as they are told to: no "too many pings".
    ('grpc.http2.min_ping_interval_without_data_ms', 1),
    ('grpc.http2.max_ping_strikes', 0),
    # Who has connected and says nothing does not keep a place for ever.
    (
      'grpc.server_handshake_timeout_ms',
      round(1000 * options.connect_seconds),
    ),
    # Two syncers on one port would each get some of the learners.
    ('grpc.so_reuseport', 0),
  ]


def channel_arguments(
  options: TransportOptions, server_name: str = ''
) -> Arguments:
  """Channel arguments of a learner."""
  arguments = [
    *_common_arguments(options),
    # Each attempt is a new connection, at our pace, not at that of a pool.
    ('grpc.use_local_subchannel_pool', 1),
    ('grpc.enable_retries', 0),
    # Payloads must take the way the address names, not that of web pages.
    ('grpc.enable_http_proxy', 0),
  ]
  if server_name:
    arguments.append(('grpc.ssl_target_name_override', server_name))
  return arguments
