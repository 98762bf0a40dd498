import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.schedule import ScheduleOptions
from tests.protocol.cluster import Cluster, syncer_options


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1000))
def test_fragments_take_turns(P, K, round_):
  schedule = ScheduleOptions(sync_every=K * P, num_fragments=P)
  assert schedule.steps_per_scan == K
  turn = [schedule.fragment_of(round_ + i) for i in range(P)]
  assert sorted(turn) == list(range(P))
  assert schedule.fragment_of(round_ + P) == turn[0]
  # From one turn of a fragment to its next, a learner takes H inner steps.
  steps = schedule.global_step_of(round_ + P) - schedule.global_step_of(round_)
  assert steps == schedule.sync_every


def test_a_multiple_is_demanded_and_proposed():
  with pytest.raises(ValueError, match=r'multiple of .* nearest: 96, 120'):
    ScheduleOptions(sync_every=100, num_fragments=24)
  with pytest.raises(ValueError, match='nearest: 24'):
    ScheduleOptions(sync_every=3, num_fragments=24)
  with pytest.raises(ValueError, match='at least 1'):
    ScheduleOptions(sync_every=3, num_fragments=0)


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
