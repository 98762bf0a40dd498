"""Rates over a sliding window."""

import pytest

from decoupled_diloco.observe.rates import RateMeter, Rates
from decoupled_diloco.observe.status import init


@pytest.fixture
def status(hand_made):
  """A running run whose figures the tests set."""
  status = init(hand_made[0])
  status.phase = 'running'
  return status


def test_nothing_to_go_by(status):
  meter = RateMeter(10.0)
  assert meter.measure(status, 5.0) == Rates()
  assert meter.measure(status, 5.0) == Rates()


def test_rates_are_those_of_the_window(status):
  meter = RateMeter(10.0)
  # One round a second up to 20, four a second from then on.
  for now in range(41):
    rounds = now if now <= 20 else 20 + 4 * (now - 20)
    status.rounds_merged = status.current_round = rounds
    status.bytes_up, status.bytes_down = 100 * rounds, 200 * rounds
    rates = meter.measure(status, float(now))
    if now == 20:
      assert rates.rounds_per_second == 1.0
      # The budget is 100 rounds.
      assert rates.left_seconds == 80.0
    if now == 25:
      # From 15 to 25: 5 + 20 rounds in 10 s.
      assert rates.rounds_per_second == 2.5
  assert rates == Rates(4.0, 400.0, 800.0, 0.0)


def test_the_budget_that_is_met_first_counts(status):
  meter = RateMeter(10.0)
  status.budget_tokens = 1000
  meter.measure(status, 0.0)
  status.rounds_merged = status.current_round = 10
  status.merged_tokens = 500.0
  # 90 rounds at 1 a second, 500 tokens at 50 a second.
  assert meter.measure(status, 10.0).left_seconds == 10.0
  status.phase = 'draining'
  assert meter.measure(status, 20.0).left_seconds is None
