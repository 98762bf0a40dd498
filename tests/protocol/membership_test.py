import pytest

from decoupled_diloco.protocol import membership
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.messages import Hello

OPTIONS = MembershipOptions(num_learners=2)
MEMBER = membership.admit(None, now=1.0, incarnation=3, num_fragments=2)


def _objection(hello, members=None):
  return membership.objection(
    OPTIONS,
    members or {},
    hello,
    run_id='run',
    layout='layout',
    versions=(4, 4),
  )


@pytest.mark.parametrize(
  'hello',
  [
    Hello(0, 'layout'),
    Hello(1, 'layout', run_id='run', incarnation=7, versions=(3, 4)),
    # It has joined, and lacks a fragment still.
    Hello(1, 'layout', run_id='run', incarnation=7, versions=(-1, 4)),
  ],
)
def test_who_fits_is_admitted(hello):
  assert _objection(hello) is None


@pytest.mark.parametrize(
  ('hello', 'reason'),
  [
    (Hello(0, 'layout', protocol=99), 'speaks protocol 99, the syncer 1'),
    (Hello(2, 'layout'), 'not one of the num_learners=2 learners 0 to 1'),
    (Hello(-1, 'layout'), 'choose a free number or raise num_learners'),
    (Hello(0, 'other'), 'start both with the same config'),
    # Two runs that share one syncer by mistake must not merge their models.
    (Hello(0, 'layout', run_id='other'), 'belongs to run other, this syncer'),
    # Nor may a syncer that has lost its state meet learners with progress.
    (Hello(0, 'layout', run_id='run', versions=(4, 5)), 'has lost progress'),
    (Hello(0, 'layout', run_id='run', versions=(4, 4, 4)), 'has lost progress'),
    (Hello(0, 'layout', run_id='run', versions=(4,)), 'has lost progress'),
  ],
)
def test_who_does_not_fit_is_told_why(hello, reason):
  assert reason in (_objection(hello) or '')


def test_an_older_life_is_superseded_once_the_newer_was_heard_of():
  hello = Hello(0, 'layout', run_id='run', incarnation=2)
  # The welcome of incarnation 3 may have been lost: 2 is the living one then.
  assert _objection(hello, {0: MEMBER}) is None
  heard = MEMBER._replace(heard_incarnation=3)
  assert 'is superseded' in (_objection(hello, {0: heard}) or '')
  # The newest life itself may reconnect, and so may a process without a past.
  for incarnation in (0, 3):
    again = Hello(0, 'layout', run_id='run', incarnation=incarnation)
    assert _objection(again, {0: heard}) is None


def test_a_new_member_has_no_past():
  assert MEMBER.is_connected
  assert not MEMBER.is_ready
  assert not MEMBER.is_expected
  assert MEMBER.last_round == -1
  assert MEMBER.merged_rounds == (-1, -1)


def test_a_returning_member_keeps_its_past():
  former = MEMBER._replace(
    is_connected=False,
    is_ready=True,
    farewell=(),
    last_round=9,
    merged_rounds=(8, 9),
    total_steps=40,
    total_tokens=4000,
  )
  member = membership.admit(former, now=7.0, incarnation=5, num_fragments=2)
  assert member == former._replace(
    incarnation=5,
    is_connected=True,
    is_ready=False,
    farewell=None,
    admitted_at=7.0,
    last_seen=7.0,
  )


@pytest.mark.parametrize(
  'change', [{'is_connected': False}, {'is_ready': False}, {'farewell': ()}]
)
def test_who_is_expected(change):
  expected = MEMBER._replace(is_ready=True)
  assert expected.is_expected
  assert expected.may_join(7)
  changed = expected._replace(**change)
  assert not changed.is_expected
  assert not changed.may_join(7)


def test_after_a_farewell_only_what_is_on_its_way_may_come():
  # Messages without a payload overtake contributions.
  leaving = MEMBER._replace(is_ready=True, farewell=(7, 9))
  assert not leaving.is_expected
  assert leaving.may_join(7)
  assert not leaving.may_join(8)


@pytest.mark.parametrize(
  ('fields', 'rule'),
  [
    ({'num_learners': 0}, 'must be at least 1'),
    ({'heartbeat_seconds': 0.0}, 'must be positive'),
    ({'start_timeout_seconds': -1.0}, 'must not be negative'),
    # One lost heartbeat must not evict a healthy member.
    ({'liveness_timeout_seconds': 2.9}, 'set it to 3.0 or more'),
  ],
)
def test_options_are_checked(fields, rule):
  with pytest.raises(ValueError, match=rule):
    MembershipOptions(**fields)
