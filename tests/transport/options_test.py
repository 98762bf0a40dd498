"""Options that make no sense are refused, with what would."""

import pytest

from decoupled_diloco.transport.options import TransportOptions


@pytest.mark.parametrize(
  ('values', 'match'),
  [
    ({'chunk_bytes': 0}, 'chunk_bytes=0 must be at least 1'),
    ({'chunk_bytes': 4 << 20}, 'chunk_bytes=4194304 must fit a packet'),
    ({'max_message_bytes': 5 << 20}, 'max_message_bytes=5242880 must fit'),
    ({'packet_bytes': 0}, 'packet_bytes=0 must be at least 1'),
    ({'packet_bytes': 4 << 20}, 'packet_bytes=4194304 must fit'),
    ({'chunk_bytes': 8, 'window_bytes': 15}, 'window_bytes=15 .* at least 16'),
    ({'link_queue': 0}, 'link_queue=0'),
    ({'backoff_jitter': 1.5}, 'backoff_jitter=1.5 must be between 0 and 1'),
    (
      {'backoff_initial_seconds': 11},
      'backoff_initial_seconds=11 must not exceed backoff_maximum_seconds=2',
    ),
    (
      {'acknowledge_seconds': 2},
      'acknowledge_seconds=2 must not exceed bulk_delay_seconds=1',
    ),
    ({'acknowledge_seconds': 0}, 'acknowledge_seconds=0 must be positive'),
    ({'connect_seconds': 0}, 'connect_seconds=0 must be positive'),
    ({'keepalive_seconds': float('nan')}, 'keepalive_seconds=nan'),
    (
      {'keepalive_seconds': 60, 'ping_timeout_seconds': 60},
      'stall_seconds=120.0 must exceed .* = 120',
    ),
  ],
)
def test_nonsense_is_refused(values, match):
  with pytest.raises(ValueError, match=match):
    TransportOptions(**values)


def test_a_silent_peer_is_lost_after_both_timeouts():
  options = TransportOptions(keepalive_seconds=3, ping_timeout_seconds=4)
  assert options.loss_seconds == 7
