"""Goodput and yield: numbers by hand, and what must always hold."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoupled_diloco.observe.goodput import (
  account,
  undisturbed_rates,
  useful_tokens,
)
from decoupled_diloco.observe.status import init, update
from decoupled_diloco.protocol.effects import Discard
from decoupled_diloco.protocol.events import TimePassed


def _status(header, steps, until=float('inf')):
  status = init(header)
  for event, effects in steps:
    if event.now <= until:
      update(status, event, effects)
  return status


def test_by_hand(hand_made):
  books = account(_status(*hand_made, until=13.0))
  # Learner 0: (0, 20] in round 0 and (0, 40] in round 1, so 40, not 60;
  # learner 1: (0, 10]. Their rates 10 and 5, from 3 to 13.
  assert books.useful_tokens == 40 + 10
  assert books.capacity_tokens == (10 + 5) * 10
  assert books.goodput == 50 / 150
  # Merged 15 + 20, processed 40 + 25.
  assert books.yield_ == 35 / 65


def test_the_drain_does_not_count_as_time(hand_made):
  # Round 0 at 3, drain at 15, end at 17.
  assert account(_status(*hand_made)).capacity_tokens == 15 * 12


def test_nothing_is_known_at_first(hand_made):
  books = account(_status(*hand_made, until=3.0))
  assert (books.goodput, books.yield_, books.capacity_tokens) == (None,) * 3
  assert books.useful_tokens == 0


def test_a_learner_never_seen_has_the_mean_rate_of_the_others(hand_made):
  # Up to 8, only learner 0 has reported a rate.
  status = _status(*hand_made, until=8.0)
  assert undisturbed_rates(status) == {0: 10.0, 1: 10.0}
  assert account(status).capacity_tokens == 20 * 5


def test_accepted_tokens_are_useful_until_they_are_discarded(hand_made):
  assert useful_tokens(_status(*hand_made, until=7.5), 0) == 20
  status = _status(*hand_made, until=8.0)
  assert useful_tokens(status, 0) == 40
  update(status, TimePassed(8.5), (Discard(0, 1),))
  assert useful_tokens(status, 0) == 20
  # Merged they were not, either way.
  assert account(status).merged_tokens == 15


def test_undisturbed_learners_have_a_goodput_near_one(tiny_run):
  # Two equal learners and no fault: both train from round 0 to the drain, and
  # of some 40 scans each only the last may be unaccounted for, and the time
  # that the news of round 0 and of the drain take.
  run = tiny_run(scan_seconds=(1.0, 1.0), rounds=40, num_fragments=4)
  books = account(_status(run.header, run.steps))
  assert books.goodput == pytest.approx(1.0, abs=0.03)


def test_an_absent_learner_costs_its_share(tiny_run):
  # Learner 1 of 2 is away for good after half of the time: about 3/4 is left.
  # The run then goes on at learner 0's pace, one round per scan of 1 s.
  faults = ((20.0, 1, 1e9, True),)
  run = tiny_run(rounds=40, num_fragments=4, faults=faults)
  books = account(_status(run.header, run.steps))
  assert books.goodput == pytest.approx(0.75, abs=0.04)


def test_keeping_progress_raises_the_yield(tiny_run):
  # Overwriting loses the scans between hand-over and adoption, rebasing keeps
  # them; the hardware trains the same.
  scripts = {'rounds': 40, 'num_fragments': 4, 'latency': 0.2}
  overwrite, rebase = (
    account(_status(run.header, run.steps))
    for run in (
      tiny_run(**scripts),
      tiny_run(**scripts, keeps_progress=True),
    )
  )
  assert overwrite.yield_ is not None and rebase.yield_ is not None
  assert overwrite.yield_ < 0.9 < rebase.yield_
  assert overwrite.goodput == pytest.approx(rebase.goodput, abs=0.05)


FAULTS = st.lists(
  st.tuples(
    st.floats(1.0, 25.0),
    st.integers(0, 2),
    st.floats(0.5, 10.0),
    st.booleans(),
  ),
  max_size=3,
  # One fault per learner: the shell's script is not cleverer than that.
  unique_by=lambda fault: fault[1],
)


@settings(
  max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
  scan_seconds=st.lists(st.floats(0.4, 3.0), min_size=3, max_size=3),
  num_fragments=st.sampled_from([1, 2, 5]),
  latency=st.floats(0.01, 0.8),
  min_learners=st.integers(1, 2),
  faults=FAULTS,
  keeps_progress=st.booleans(),
)
def test_conservation(
  tiny_run,
  scan_seconds,
  num_fragments,
  latency,
  min_learners,
  faults,
  keeps_progress,
):
  run = tiny_run(
    scan_seconds=tuple(scan_seconds),
    num_fragments=num_fragments,
    latency=latency,
    min_learners=min_learners,
    faults=tuple(faults),
    keeps_progress=keeps_progress,
    rounds=15,
  )
  status = init(run.header)
  for event, effects in run.steps:
    update(status, event, effects)
    books = account(status)
    # What lives on was trained on, and what was merged lives on; and when
    # learners overwrite, no work is merged twice.
    assert books.useful_tokens <= books.processed_tokens
    if not keeps_progress:
      assert books.merged_tokens <= books.useful_tokens + 1e-6
      assert books.yield_ is None or books.yield_ <= 1 + 1e-9
  assert status.processed_tokens <= sum(run.trained_tokens.values())
  assert status.rounds_merged == run.state.rounds_merged
  assert status.merged_tokens == pytest.approx(run.state.merged_tokens)
  for learner in status.learners.values():
    assert learner.participation is None or 0 <= learner.participation <= 1
  waiting = set(status.accepted)
  assert waiting == {
    (number, entry.learner)
    for number, round_ in run.state.rounds.items()
    for entry in round_.entries
  }
