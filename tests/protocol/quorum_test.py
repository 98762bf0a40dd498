import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.protocol import quorum
from decoupled_diloco.protocol.quorum import QuorumOptions


def _decide(k_min, contributors, returned, expected):
  return quorum.decide(
    QuorumOptions(k_min),
    contributors=contributors,
    returned=returned,
    expected=expected,
  )


@pytest.mark.parametrize(
  ('k_min', 'contributors', 'returned', 'expected', 'decision'),
  [
    # Too few, whoever is connected.
    (1, [], [], [0, 1], (False, False, '0 of 1 required learners')),
    (3, [0, 1], [0, 1], [0, 1], (False, False, '2 of 3 required learners')),
    # Enough, but they have not come back: the next round is not due yet.
    (
      2,
      [0, 1],
      [1],
      [0, 1, 2],
      (
        False,
        False,
        '1 of 2 required learners have come back with the next round',
      ),
    ),
    # Enough, and enough are back.
    (
      2,
      [0, 1],
      [0, 1],
      [0, 1, 2],
      (True, False, '2 contributions, 2 required'),
    ),
    # Everybody who is connected is in: nobody to wait for.
    (2, [0, 1], [], [0, 1], (True, True, 'all 2 connected learners are in')),
    # A contributor that has left since still counts.
    (2, [0, 1], [], [1], (True, True, 'all 1 connected learners are in')),
    (1, [0], [], [], (True, True, 'all 0 connected learners are in')),
  ],
)
def test_decisions_with_their_reasons(
  k_min, contributors, returned, expected, decision
):
  assert _decide(k_min, contributors, returned, expected) == decision


_LEARNERS = st.sets(st.integers(0, 5))


@given(st.integers(1, 6), _LEARNERS, _LEARNERS, _LEARNERS)
def test_a_quorum_never_has_fewer_than_k_min(
  k_min, contributors, returned, expected
):
  decision = _decide(k_min, contributors, returned, expected)
  assert decision.reason
  if decision.is_reached:
    assert len(contributors) >= k_min
  if decision.is_unanimous:
    assert decision.is_reached
    assert expected <= contributors


@given(st.integers(1, 6), _LEARNERS, _LEARNERS, _LEARNERS, st.integers(0, 5))
def test_one_more_contribution_never_undoes_a_quorum(
  k_min, contributors, returned, expected, learner
):
  before = _decide(k_min, contributors, returned, expected)
  after = _decide(k_min, contributors | {learner}, returned, expected)
  assert after.is_reached >= before.is_reached


def test_shortage_names_who_is_missing():
  options = QuorumOptions(3)
  last_seen = {0: 8.9, 1: 8.8, 2: 1.9}
  reason = quorum.shortage(
    options, now=9.0, connected=[0, 1], last_seen=last_seen
  )
  assert reason == '2 of 3 required learners; learner 2 last seen 7.1 s ago'
  reason = quorum.shortage(options, now=9.0, connected=[], last_seen={})
  assert reason == '0 of 3 required learners'
  assert not quorum.shortage(
    options, now=9.0, connected=[0, 1, 2], last_seen=last_seen
  )


def test_a_quorum_of_nobody_is_refused():
  with pytest.raises(ValueError, match='nothing to merge'):
    QuorumOptions(0)
