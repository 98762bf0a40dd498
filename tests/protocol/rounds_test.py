import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.protocol import rounds
from decoupled_diloco.protocol.effects import Share
from decoupled_diloco.protocol.messages import Contribution, Reason
from decoupled_diloco.protocol.rounds import Round, Stage
from decoupled_diloco.protocol.weights import StalenessOptions


def _entry(learner, round_=6, base=3, steps=10, tokens=100, is_waiting=False):
  return Contribution(
    learner=learner,
    incarnation=1,
    round=round_,
    fragment=round_ % 3,
    base_version=base,
    steps=steps,
    tokens=tokens,
    total_steps=steps,
    total_tokens=tokens,
    step_seconds=1.0,
    is_waiting=is_waiting,
  )


def _round(*entries, number=6, stage=Stage.OPEN):
  round_ = Round(number, number % 3, stage)
  for i, entry in enumerate(entries):
    round_ = round_.with_entry(2.0**i, entry)
  return round_


def test_quorum_time_runs_from_the_first_to_the_k_min_th():
  round_ = _round(_entry(2), _entry(0), _entry(1))  # At 1, 2 and 4 s.
  assert round_.quorum_seconds(1) == 0.0
  assert round_.quorum_seconds(2) == 1.0
  assert round_.quorum_seconds(3) == 3.0


def test_a_round_without_a_learner():
  round_ = _round(_entry(2), _entry(0), _entry(1)).without(0)
  assert [entry.learner for entry in round_.entries] == [2, 1]
  assert round_.arrivals == (1.0, 4.0)
  assert round_.without(7) == round_


def test_shares_weigh_tokens_steps_and_staleness():
  options = StalenessOptions(staleness_discount=0.5, max_staleness=2)
  entries = (
    _entry(1, steps=10, tokens=200),  # 200 * 200 / 10 = 4000
    _entry(0, base=1),  # 100 * 100 / 10 = 1000, two versions old: 250
    _entry(2, base=0),  # three versions old: refused
  )
  shares, stale = _round(*entries).shares(options, version=3)
  assert shares == (Share(0, 250.0), Share(1, 4000.0))
  assert stale == (
    (entries[2], 'base version 0 is 3 versions old, max_staleness=2'),
  )


@given(st.permutations(range(4)))
def test_shares_do_not_depend_on_the_order_of_arrival(order):
  entries = [_entry(m, tokens=100 + m) for m in order]
  shares, _ = _round(*entries).shares(StalenessOptions(), version=3)
  assert [share.learner for share in shares] == [0, 1, 2, 3]
  assert shares[2].weight == pytest.approx(102 * 102 / 10)


def test_who_has_come_back():
  six = _round(_entry(0), _entry(1), _entry(2))
  seven = _round(_entry(0, 7), number=7)
  nine = _round(_entry(3, 9), number=9)
  kept = {6: six, 7: seven, 9: nine}
  # 0 came with the next round, 3 with a later one.
  assert rounds.returned(kept, 6) == {0, 3}
  assert rounds.returned(kept, 7) == {3}
  assert rounds.returned({6: six}, 5) == {0, 1, 2}


def test_when_those_count_as_come_back_who_cannot():
  six = _round(_entry(0), _entry(1, is_waiting=True))
  # K=4 steps of 1 s since the round before had its quorum, at 10.
  times = {'paced_at': 10.0, 'steps_per_scan': 4}
  assert rounds.return_times(six, **times, num_fragments=3) == {1: 14.0}
  assert rounds.return_times(six, **times, num_fragments=1) == {
    0: 14.0,
    1: 14.0,
  }


@pytest.mark.parametrize(
  ('entry', 'reason'),
  [
    (_entry(1, 6), None),
    (_entry(1, 7), None),  # Nobody has come with it yet.
    (_entry(1, 10), None),
    (_entry(1, 11), Reason.UNKNOWN_ROUND),
    (_entry(1, -1), Reason.UNKNOWN_ROUND),
    (_entry(0, 6), Reason.DUPLICATE),
    (_entry(0, 4), Reason.DUPLICATE),
    (_entry(1, 5), None),  # In its grace.
    (_entry(1, 4), Reason.LATE),  # Being merged.
    (_entry(1, 3), Reason.LATE),  # Forgotten.
    (_entry(1, 8), Reason.LATE),  # Of the drain, and merged already.
  ],
)
def test_a_contribution_has_its_time(entry, reason):
  kept = {
    4: _round(_entry(0, 4), number=4, stage=Stage.MERGING),
    5: _round(_entry(0, 5), number=5, stage=Stage.GRACE),
    6: _round(_entry(0, 6), number=6),
  }
  objection = rounds.timing_objection(
    kept,
    entry,
    current=6,
    merged=8 if entry.round == 8 else 2,
    newest_allowed=10,
  )
  assert (objection and objection[0]) == reason
