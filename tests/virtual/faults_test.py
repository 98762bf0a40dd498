"""Learners that come and go, and links that lose things."""

import dataclasses

import optax
import pytest

from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.simulate.options import (
  FailureOptions,
  Fault,
  LinkOptions,
  SpeedOptions,
)
from decoupled_diloco.virtual import LearnerSetup, VirtualCluster
from tests.virtual import small
from tests.virtual.small import K, contributions, run


def _adam_count(cluster, learner):
  state = cluster.work.stack.snapshot(learner).opt_state
  return int(optax.tree.get(state, 'count'))


@pytest.mark.parametrize('snapshot_every_scans', [0, 2])
def test_a_killed_learner_comes_back(snapshot_every_scans):
  asked = []
  read = small.batches(1)

  def batches(first, count):
    asked.append(first)
    return read(first, count)

  setup = small.setup(
    rounds=20,
    learners=(
      LearnerSetup(small.batches(0), SpeedOptions(0.5)),
      LearnerSetup(batches, SpeedOptions(0.5)),
    ),
    failures=FailureOptions((Fault(5.5, 1, 'kill', 4.0),)),
    snapshot_every_scans=snapshot_every_scans,
  )
  cluster = VirtualCluster(setup)
  cluster.engine.run(until=5.6)
  assert _adam_count(cluster, 1) == 5 * K
  cluster.engine.run(until=9.6)
  # It is back at 9.5 with the syncer's parameters.
  theta = cluster.work.model.params(cluster.work.initial)
  assert small.same(cluster.work.stack.snapshot(1).params, theta)
  # Its optimizer is that of the snapshot after four scans, or fresh.
  assert _adam_count(cluster, 1) == (4 * K if snapshot_every_scans else 0)
  rejoin_step = int(cluster.work.stack.snapshot(1).rejoin_step)
  # One round per second: round 9 is open.
  assert (rejoin_step > 0) == (snapshot_every_scans == 0)
  assert rejoin_step in (9 * K, -(2**30))
  result = cluster.run()
  # The syncer had heard of all its whole scans, so it reads on where it was:
  # every batch once. (The one of the lost scan was read ahead already.)
  assert asked == list(range(0, K * len(asked), K))
  assert result.participation[0] == 1.0
  part = result.participation[1]
  assert part is not None
  assert 0.7 < part < 0.9
  assert result.reason == '20 rounds'


def test_a_late_joiner_and_a_leaver():
  setup = small.setup(
    M=3,
    rounds=20,
    failures=FailureOptions((Fault(6.2, 2, 'join'), Fault(12.3, 0, 'leave'))),
  )
  result = VirtualCluster(setup).run()
  late, left = contributions(result, 2), contributions(result, 0)
  # The run starts after 1.5 s with those who are there. The late one ends its
  # first scan at 7.2; the leaver the last, in which it was told, at 12.5.
  assert late[0][0] == pytest.approx(7.2)
  assert left[-1][0] == pytest.approx(12.5)
  farewell = next(
    event
    for event, _ in result.steps
    if isinstance(event, ev.MessageArrived)
    and isinstance(event.message, msg.Farewell)
  )
  assert (farewell.now, farewell.message.learner) == (12.5, 0)  # pyright: ignore
  assert result.reason == '20 rounds'


@pytest.mark.parametrize('on_loss', ['damaged', 'dropped'])
@pytest.mark.parametrize('mode', ['train', 'wait'])
def test_lost_payloads_cost_time_only(on_loss, mode):
  # One in 256 contributions is lost in four tries; here none is.
  link = LinkOptions(0.05, loss=0.25, on_loss=on_loss)
  result = run(
    rounds=25,
    k_min=2,
    limit=4 if mode == 'train' else 0,
    on_lead_limit=mode,
    learners=tuple(
      LearnerSetup(small.batches(m), SpeedOptions(0.5), link) for m in range(2)
    ),
    adopt=AdoptOptions('rebase'),
  )
  refused = [
    effect.message.reason
    for _, effects in result.steps
    for effect in effects
    if isinstance(effect, fx.Send) and isinstance(effect.message, msg.Refusal)
  ]
  assert result.reason == '25 rounds'
  assert (msg.Reason.CORRUPT in refused) == (on_loss == 'damaged')
  # Progress that no merge has seen is kept: all of it is merged in the end.
  assert result.yield_ == pytest.approx(1.0)


def test_a_narrow_link_makes_payloads_late():
  # The first hand-over, of fragment 0, leaves at t = 1 and takes its size /
  # rate and the latency.
  setup = small.setup(rounds=20)
  size = 4 * setup.plan.sizes[0]
  slow = LinkOptions(0.1, bytes_per_second=size / 1.7)
  learners = tuple(
    LearnerSetup(each.batches, each.speed, slow) for each in setup.learners
  )
  result = VirtualCluster(dataclasses.replace(setup, learners=learners)).run()
  # Before that, the initial values come one after the other, and round 0 opens.
  began = 0.1 + 0.1 + 4 * 35 / slow.bytes_per_second + 2 * 0.1
  at, first = contributions(result, 0)[0]
  assert first.round == 0
  assert at == pytest.approx(began + 1.0 + 1.7 + 0.1)
  assert result.overlap_steps is not None
  assert result.overlap_steps > 3 * K
