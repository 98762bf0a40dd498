import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.syncer_state import BudgetOptions
from tests.protocol.cluster import Cluster, syncer_options
from tests.protocol.cluster_parts import PAYLOAD_BYTES, TOKENS_PER_STEP


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1000))
def test_fragments_take_turns(P, K, round_):
  schedule = ScheduleOptions(sync_every=K * P, num_fragments=P)
  assert schedule.steps_per_scan == K
  turn = [schedule.fragment_of(round_ + i) for i in range(P)]
  assert sorted(turn) == list(range(P))
  assert schedule.fragment_of(round_ + P) == turn[0]
  # From one turn of a fragment to its next, a learner takes H inner steps.
  first, next_ = (
    schedule.global_step_of(number, 1e9) for number in (round_, round_ + P)
  )
  assert next_ - first == schedule.sync_every


def test_a_multiple_is_demanded_and_proposed():
  with pytest.raises(ValueError, match=r'multiple of .* nearest: 96, 120'):
    ScheduleOptions(sync_every=100, num_fragments=24)
  with pytest.raises(ValueError, match='nearest: 24'):
    ScheduleOptions(sync_every=3, num_fragments=24)
  with pytest.raises(ValueError, match='at least 1'):
    ScheduleOptions(sync_every=3, num_fragments=0)
  with pytest.raises(ValueError, match='tokens_per_step=-1'):
    ScheduleOptions(tokens_per_step=-1)


@pytest.mark.parametrize('k_min', [1, 2])
def test_first_exchange_comes_after_k_steps_and_every_fragment_every_h(k_min):
  # H=12, P=3: K=4. Round r holds the work of steps up to 4 (r + 1): the first
  # exchange comes neither at step 0 nor after H + 1 steps.
  options = syncer_options(M=2, k_min=k_min, H=12, P=3, rounds=9)
  cluster = Cluster(options, [lambda: 1.0, lambda: 1.0]).run()
  contributions = [
    event.message
    for event, _ in cluster.tape
    if isinstance(event, ev.MessageArrived)
    and isinstance(event.message, msg.Contribution)
    and event.now < cluster.when(msg.DrainStarted)
  ]
  assert len(contributions) >= 16
  for each in contributions:
    assert each.total_steps == 4 * (each.round + 1)
    assert each.fragment == each.round % 3
  # The learning rate follows the same count: scan r begins at step 4 r.
  assert cluster.starts(0)[:9] == [0, 4, 8, 12, 16, 20, 24, 28, 32]


def tokens_cluster(loses):
  """Two learners to a budget of 60 inner steps of both, in tokens."""
  schedule = ScheduleOptions(
    sync_every=12, num_fragments=3, tokens_per_step=2 * TOKENS_PER_STEP
  )
  budget = BudgetOptions(merged_tokens=60 * schedule.tokens_per_step)
  options = syncer_options(k_min=1, schedule=schedule, budget=budget)

  def arrivals(contribution):
    if contribution.learner == 1 and loses(contribution.round):
      return ()
    return (ev.PayloadFacts(PAYLOAD_BYTES, norm=1.0),)

  # With 'rebase', as otherwise adoption loses tokens, too.
  return Cluster(
    options,
    [lambda: 4.0, lambda: 4.0],
    arrivals=arrivals,
    keeps_progress=True,
  ).run()


def test_the_global_step_follows_the_tokens_that_were_merged():
  whole = tokens_cluster(lambda round_: False)
  # With nothing lost it lags behind the rounds by the scans whose tokens not
  # every fragment has merged yet, and by that in which they were merged.
  steps = whole.starts(0)
  behind = {4 * i - step for i, step in enumerate(steps)}
  assert steps == sorted(steps) and behind <= set(range(13))
  lossy = tokens_cluster(lambda round_: round_ % 3 > 0 and round_ < 25)
  # It takes more rounds to get as far, and the step knows.
  assert len(lossy.starts(0)) > 1.3 * len(steps)
  for cluster in (whole, lossy):
    assert 50 <= cluster.starts(0)[-1] <= 60
    assert cluster.starts(0)[-1] == cluster.starts(1)[-1]


def test_a_learner_that_comes_late_begins_where_the_tokens_are():
  schedule = ScheduleOptions(
    sync_every=4, num_fragments=2, tokens_per_step=2 * TOKENS_PER_STEP
  )
  options = syncer_options(k_min=1, H=4, P=2, rounds=60, schedule=schedule)
  cluster = Cluster(options, [lambda: 2.0, lambda: 2.0], keeps_progress=True)
  cluster.run(until=10.0)
  cluster.kill(1)
  cluster.run(until=50.0)
  cluster.start(1)
  cluster.run()
  first, *_ = cluster.starts(1)
  # 10 steps of both, and 40 of one that count half.
  assert 27 <= first <= 30
