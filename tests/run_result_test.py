"""What the end of a run means for the process that tells it."""

import signal

import pytest

from decoupled_diloco.run_result import Result


@pytest.mark.parametrize(
  ('fields', 'is_success', 'exit_code'),
  [
    ({}, True, 0),
    ({'has_met_budget': False}, False, 1),
    ({'is_finite': False}, False, 1),
    ({'failure': 'The disk is full.'}, False, 1),
    # Stopped before its planned end, or while it was measured afterwards.
    (
      {'has_met_budget': False, 'stopped_by': signal.SIGINT},
      False,
      128 + signal.SIGINT,
    ),
    ({'stopped_by': signal.SIGTERM}, True, 128 + signal.SIGTERM),
    # What has failed says more than the signal does.
    ({'failure': 'The disk is full.', 'stopped_by': 15}, False, 1),
  ],
)
def test_how_a_run_ended(fields, is_success, exit_code):
  ended = {'reason': 'words', 'has_met_budget': True, 'is_finite': True}
  result = Result(**(ended | fields))
  assert (result.is_success, result.exit_code) == (is_success, exit_code)
