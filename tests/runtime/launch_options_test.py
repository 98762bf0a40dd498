"""What a local run may be asked for."""

import pytest

from decoupled_diloco.runtime.launch_options import LaunchOptions


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'max_restarts': -1}, 'max_restarts=-1 must not be negative'),
    ({'restart_seconds': -0.5}, 'restart_seconds=-0.5 must not be'),
    ({'start_seconds': 0}, 'start_seconds=0 must be positive'),
    ({'stop_seconds': 0.0}, 'stop_seconds=0.0 must be positive'),
    ({'kill': ((1, 1.0),)}, r'kill=\(\(1, 1.0\),\) must .* between 0 and 1'),
    ({'kill': ((1, 0.0),)}, r'kill=\(\(1, 0.0\),\) must .* between 0 and 1'),
    ({'kill': (1, 0.5)}, r'kill=\(1, 0.5\) must be pairs .*\(\(2, 0.4\),\)'),
    ({'kill': ((1,),)}, 'must be pairs'),
    ({'kill': ((1, 0.5, 2),)}, 'must be pairs'),
    ({'kill': (('one', 0.5),)}, 'must be pairs'),
    ({'kill': ((1.5, 0.5),)}, 'must be pairs'),
    ({'kill': ((1, float('nan')),)}, 'must be pairs'),
    ({'kill': 'abc'}, "kill='abc' must be pairs"),
    ({'kill': None}, 'kill=None must be pairs'),
  ],
)
def test_options_check_themselves(settings, message):
  with pytest.raises(ValueError, match=message):
    LaunchOptions(**settings)


def test_kills_may_come_as_lists():
  """As configs give them."""
  options = LaunchOptions(kill=[[2, '0.5']])  # pyright: ignore
  assert options.kill == ((2, 0.5),)


def test_the_syncer_may_be_killed_too():
  assert LaunchOptions(kill=(('syncer', 0.5),)).kill == (('syncer', 0.5),)
