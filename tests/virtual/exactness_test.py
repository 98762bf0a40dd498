"""What a virtual cluster computes, against plain loops that do the same."""

import jax
import jax.numpy as jnp
import optax
import pytest

from decoupled_diloco.ops.codecs import codec
from decoupled_diloco.simulate.options import (
  SpeedOptions,
)
from decoupled_diloco.training.outer_options import OuterOptions
from decoupled_diloco.training.wire_format import WireOptions
from decoupled_diloco.virtual import LearnerSetup, VirtualCluster
from tests.virtual import small
from tests.virtual.small import EXACT, INT4, TASK, K


def _run(**fields):
  return VirtualCluster(small.setup(**fields)).run()


def _streaming_diloco(setup, rounds, wire):
  """The same training as a plain loop.

  Every K steps the learners' mean delta of one fragment goes through an outer
  optimizer; what is published is adopted at once.

  Returns:
    Global parameters and the learners' parameters, after so many rounds.
  """
  plan, tx = setup.plan, setup.inner
  outer = optax.sgd(0.6, 0.5, nesterov=True)
  up, down = codec(wire, block_size=8), codec(wire, block_size=8)
  residuals = {}
  theta = jax.jit(TASK.init)(jax.random.key(0))
  local = [theta for _ in setup.learners]
  opt = [tx.init(theta) for _ in local]
  outer_state = {
    p: outer.init(plan.take(theta, p)) for p in range(plan.num_fragments)
  }

  @jax.jit
  def step(params, state, batch):
    grads = jax.grad(lambda p: TASK.loss(p, batch, jax.random.key(0))[0])(
      params
    )
    with jax.numpy_dtype_promotion('standard'):
      updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for number in range(rounds):
    p = number % plan.num_fragments
    for m, learner in enumerate(setup.learners):
      data = learner.batches(number * K, K)
      for k in range(K):
        batch = jax.tree.map(lambda leaf, k=k: leaf[k], data)
        local[m], opt[m] = step(local[m], opt[m], batch)
    base = plan.take(theta, p)
    deltas = []
    for params in local:
      delta = tuple(
        b - l for b, l in zip(base, plan.take(params, p), strict=True)
      )
      deltas.append(up.decode(up.encode(delta, ())[0]))
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *deltas)
    update, outer_state[p] = outer.update(mean, outer_state[p], base)
    if wire != 'f32':  # Error feedback of what is published.
      left = residuals.get(p, jax.tree.map(jnp.zeros_like, update))
      wanted = jax.tree.map(jnp.add, update, left)
      update = down.decode(down.encode(wanted, ())[0])
      residuals[p] = jax.tree.map(jnp.subtract, wanted, update)
    published = jax.tree.map(jnp.add, base, update)
    theta = plan.put(theta, p, published)
    local = [plan.put(params, p, published) for params in local]
  return theta, local


@pytest.mark.parametrize('P', [1, 3])
@pytest.mark.parametrize(('name', 'wire'), [('f32', EXACT), ('int4', INT4)])
@pytest.mark.parametrize('at_once', ['vmap', 'one'])
def test_it_equals_a_plain_loop_of_streaming_diloco(P, name, wire, at_once):
  # K_min = M, no latency, learners wait for every publication.
  setup = small.setup(
    M=3,
    P=P,
    k_min=3,
    limit=0,
    on_lead_limit='wait',
    rounds=100,
    wire=wire,
    outer=OuterOptions(gain=1.2, momentum=0.5, merge='mean'),
    learners_at_once=at_once,
  )
  cluster = VirtualCluster(setup)
  rounds = 7
  cluster.engine.run(until=rounds + 0.5)
  theta, local = _streaming_diloco(setup, rounds, name)
  small.close(cluster.work.model.params(theta), theta)
  for m, params in enumerate(local):
    small.close(cluster.work.stack.snapshot(m).params, params)


def test_vmap_and_one_by_one_agree_for_learners_of_any_speed():
  # Four learners of three speeds: their scans overlap in groups of 1, 2 and 4.
  learners = tuple(
    LearnerSetup(small.batches(m), SpeedOptions(seconds))
    for m, seconds in enumerate([0.5, 0.5, 0.6, 0.9])
  )
  results = [
    _run(M=4, learners=learners, learners_at_once=how)
    for how in ('vmap', 'one')
  ]
  assert results[0].steps[:3] == results[1].steps[:3]
  small.close(results[0].params, results[1].params)


def test_one_learner_alone():
  # Plain outer SGD with rate 1 on f32 deltas, waiting: it merges what it has,
  # so nothing but rounding distinguishes it from plain training.
  setup = small.setup(M=1, limit=0, on_lead_limit='wait', rounds=100)
  cluster = VirtualCluster(setup)
  cluster.engine.run(until=8.5)
  params = jax.jit(TASK.init)(jax.random.key(0))
  state = setup.inner.init(params)
  data = setup.learners[0].batches(0, 8 * K)
  for k in range(8 * K):
    batch = jax.tree.map(lambda leaf, k=k: leaf[k], data)
    grads = jax.grad(lambda p, b=batch: TASK.loss(p, b, jax.random.key(0))[0])(
      params
    )
    with jax.numpy_dtype_promotion('standard'):
      updates, state = setup.inner.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  small.close(cluster.work.stack.snapshot(0).params, params)


def test_all_copies_of_a_version_are_one():
  cluster = VirtualCluster(
    small.setup(wire=INT4, limit=0, on_lead_limit='wait', k_min=2)
  )
  cluster.engine.run(until=4.5)
  theta = cluster.work.model.params(cluster.work.initial)
  held = [cluster.work.stack.snapshot(m).params for m in range(2)]
  # Round 3 exchanged fragment 0, which nobody has trained since t = 4.
  plan = cluster._setup.plan
  for params in held:
    assert small.same(plan.take(params, 0), plan.take(theta, 0))


def test_values_in_bfloat16():
  # The learner starts from what it is sent, which is rounded.
  wire = WireOptions(
    up='f32', down='bf16', down_form='value', down_error_feedback=False
  )
  cluster = VirtualCluster(
    small.setup(M=1, P=1, limit=0, on_lead_limit='wait', wire=wire, rounds=99)
  )
  cluster.engine.run(until=3.5)
  theta = cluster.work.model.params(cluster.work.initial)
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), theta
  )
  assert small.same(cluster.work.stack.snapshot(0).params, rounded)
  assert not small.same(theta, rounded)
