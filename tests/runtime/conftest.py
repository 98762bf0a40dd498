"""Runs of stand-ins, of which nothing may be left."""

import gc

import pytest

from tests.runtime.stand_ins import Run


@pytest.fixture
def make(tmp_path):
  """Makes runs, and looks after each test whether anything is left of them."""
  runs = []

  def make_run(*args, **kwargs) -> Run:
    runs.append(Run(tmp_path, *args, **kwargs))
    return runs[-1]

  yield make_run
  for run in runs:
    run.assert_nobody_is_left()
  # A process or file that was left open would warn now, which is an error.
  runs.clear()
  gc.collect()
