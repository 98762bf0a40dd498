"""The mixture of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from decoupled_diloco.models import moe

WIDTH, MLP_WIDTH = 8, 16


def make_layer(**changes) -> moe.MixtureOfExperts:
  options = {
    'num_experts': 4,
    'experts_per_token': 2,
    'capacity_factor': 2.0,
    'group_tokens': 512,
    'load_balance_weight': 0.01,
    'router_z_weight': 0.001,
    'activation': 'swiglu',
    'out_scale': 1.0,
    'dtype': jnp.dtype('float32'),
  }
  return moe.MixtureOfExperts(
    WIDTH, MLP_WIDTH, **(options | changes), rngs=nnx.Rngs(0)
  )


def run(layer: moe.MixtureOfExperts, x):
  """The layer's result, compiled as a whole: quicker than operation by one."""
  graphdef, state = nnx.split(layer)
  return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


def logits_of(*choices: tuple[int, ...], num_experts: int = 3):
  """Logits of one group, whose tokens like these experts, the first best."""
  logits = np.zeros((1, len(choices), num_experts), np.float32)
  for token, experts in enumerate(choices):
    for rank, expert in enumerate(experts):
      logits[0, token, expert] = 10.0 - rank
  return jnp.asarray(logits)


def route(logits, experts_per_token, slots, is_real=None):
  if is_real is None:
    is_real = jnp.ones(logits.shape[:2])
  return jax.jit(moe.route, static_argnums=(2, 3))(
    logits, is_real, experts_per_token, slots
  )


def without_slots(layer: moe.MixtureOfExperts, x):
  """All experts see all tokens, and most of it is multiplied by zero."""
  kernel, gate, up, down = (
    np.array(part.kernel[...])
    for part in (
      layer.router,
      layer.experts.gate,
      layer.experts.up,
      layer.experts.down,
    )
  )
  tokens = np.array(x).reshape(-1, WIDTH)
  score = np.exp(tokens @ kernel)
  weights = score / score.sum(axis=1, keepdims=True)
  best = np.argsort(-weights, axis=1)[:, : layer.experts_per_token]
  chosen = np.zeros_like(weights)
  np.put_along_axis(chosen, best, 1.0, axis=1)
  weights *= chosen
  if layer.experts_per_token > 1:
    weights /= weights.sum(axis=1, keepdims=True)
  hidden = np.einsum('tw,ewm->etm', tokens, gate)
  hidden *= np.einsum('tw,ewm->etm', tokens, up) / (1 + np.exp(-hidden))
  updates = np.einsum('etm,emw->etw', hidden, down)
  return np.einsum('te,etw->tw', weights, updates).reshape(x.shape)


@pytest.mark.parametrize('experts_per_token', [1, 2, 4])
def test_without_drops_each_token_gets_the_mean_of_its_experts(
  experts_per_token,
):
  # 4 / k times the even share is one slot for each token.
  layer = make_layer(
    experts_per_token=experts_per_token,
    capacity_factor=4 / experts_per_token,
  )
  x = jax.random.normal(jax.random.key(1), (2, 5, WIDTH))
  update, extra = run(layer, x)
  np.testing.assert_allclose(
    update, without_slots(layer, x), rtol=1e-4, atol=1e-5
  )
  assert extra.metrics['dropped'] == 0.0


def test_groups_change_nothing_while_nothing_is_dropped():
  # 7 tokens in groups of at most 3: three of 3, two of them filled up.
  whole, cut = (
    make_layer(capacity_factor=2.0, group_tokens=size) for size in (512, 3)
  )
  x = jax.random.normal(jax.random.key(1), (2, 7, WIDTH))
  (update, extra), (cut_update, cut_extra) = run(whole, x), run(cut, x)
  np.testing.assert_allclose(cut_update, update, rtol=1e-5, atol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    cut_extra,
    extra,
  )


def test_slots_go_to_the_first_tokens():
  # Tokens 0, 1 and 3 want expert 0, which has two slots; token 2 wants 2.
  routing = route(logits_of((0,), (0,), (2,), (0,)), 1, slots=2)
  np.testing.assert_array_equal(
    np.argwhere(routing.dispatch[0]), [[0, 0, 0], [1, 0, 1], [2, 2, 0]]
  )
  assert routing.dropped == 0.25  # one of four choices
  # The weight of a single expert is its probability: e^10 / (e^10 + 2).
  probability = np.exp(10) / (np.exp(10) + 2)
  np.testing.assert_allclose(
    routing.combine, probability * routing.dispatch, rtol=1e-5
  )


def test_weights_of_several_experts_sum_to_one():
  # Token 0 likes 1 then 2, token 1 likes 2 then 1: logits 10 and 9.
  routing = route(logits_of((1, 2), (2, 1)), 2, slots=2)
  # exp(10) / (exp(10) + exp(9)) = 1 / (1 + 1 / e).
  first = 1 / (1 + np.exp(-1))
  np.testing.assert_allclose(
    jnp.sum(routing.combine[0], axis=-1),
    [[0, first, 1 - first], [0, 1 - first, first]],
    rtol=1e-5,
  )
  # A second choice takes a slot before a later token's first one.
  routing = route(logits_of((1, 2), (2, 1)), 2, slots=1)
  np.testing.assert_array_equal(
    np.argwhere(routing.dispatch[0]), [[0, 1, 0], [0, 2, 0]]
  )


def test_balance_by_hand():
  # All probabilities equal: 3 * sum(share * 1/3) = 1 whatever is chosen, and
  # log sum exp(0, 0, 0) = log 3.
  routing = route(jnp.zeros((1, 6, 3)), 2, slots=6)
  np.testing.assert_allclose(routing.load_balance, 1.0, rtol=1e-6)
  np.testing.assert_allclose(routing.router_z, np.log(3) ** 2, rtol=1e-6)
  # All choose expert 0, nearly surely: 3 * (1 * 1) = 3; log sum exp is 100.
  routing = route(10 * logits_of(*[(0,)] * 6), 1, slots=6)
  np.testing.assert_allclose(routing.load_balance, 3.0, rtol=1e-6)
  np.testing.assert_allclose(routing.router_z, 100.0**2, rtol=1e-6)
  # Two choose each expert: 3 * 3 * (1/3 * 1/3) = 1.
  routing = route(10 * logits_of(*[(0,), (1,), (2,)] * 2), 1, slots=6)
  np.testing.assert_allclose(routing.load_balance, 1.0, rtol=1e-6)


def test_filling_counts_for_nothing():
  real = logits_of((0,), (2,))
  filled = jnp.concatenate([logits_of((0,), (0,)), real], axis=1)
  is_real = jnp.array([[0.0, 0.0, 1.0, 1.0]])
  routing, expected = route(filled, 1, 1, is_real), route(real, 1, 1)
  np.testing.assert_array_equal(routing.dispatch[:, 2:], expected.dispatch)
  assert not np.any(routing.dispatch[:, :2])
  for name in ('load_balance', 'router_z', 'dropped'):
    np.testing.assert_allclose(
      getattr(routing, name), getattr(expected, name), rtol=1e-6
    )


def test_number_of_slots():
  # 10 tokens with 2 of 4 experts fill 5 slots each, if evenly routed.
  assert make_layer(capacity_factor=1.0).slots(10) == 5
  assert make_layer(capacity_factor=1.25).slots(10) == 7  # 6.25
  assert make_layer(capacity_factor=9.0).slots(10) == 10  # one a token
  assert make_layer(capacity_factor=0.01).slots(10) == 1
  # 1.1 * 10 is 11.000000000000002.
  layer = make_layer(num_experts=2, experts_per_token=1, capacity_factor=1.1)
  assert layer.slots(20) == 11


def test_dropped_tokens_are_passed_on_unchanged():
  layer = make_layer(experts_per_token=1, capacity_factor=0.5)
  # Equal tokens choose one expert, which has ceil(0.5 * 8 / 4) = 1 slot.
  update, extra = run(layer, jnp.ones((1, 8, WIDTH)))
  assert np.all(update[0, 1:] == 0.0)
  assert np.any(update[0, 0] != 0.0)
  assert extra.metrics['dropped'] == 7 / 8


def test_the_penalty_is_weighted():
  x = jax.random.normal(jax.random.key(1), (2, 5, WIDTH))
  layer = make_layer(load_balance_weight=3.0, router_z_weight=5.0)
  _, extra = run(layer, x)
  np.testing.assert_allclose(
    extra.penalty,
    3 * extra.metrics['load_balance'] + 5 * extra.metrics['router_z'],
    rtol=1e-6,
  )


def test_the_penalty_evens_the_routing_out():
  layer = make_layer(load_balance_weight=1.0, router_z_weight=0.0)
  # A mean of one in the first feature, which the router sends to expert 0.
  x = jax.random.normal(jax.random.key(1), (4, 32, WIDTH)).at[..., 0].add(1.0)
  kernel = layer.router.kernel
  kernel[...] = kernel[...].at[0, 0].add(2.0)
  graphdef, state = nnx.split(layer)

  @jax.jit
  def descend(state):
    def penalty(state):
      extra = nnx.merge(graphdef, state)(x)[1]
      return extra.penalty, extra.metrics

    gradient, metrics = jax.grad(penalty, has_aux=True)(state)
    return jax.tree.map(lambda p, g: p - 0.5 * g, state, gradient), metrics

  state, before = descend(state)
  for _ in range(50):
    state, after = descend(state)
  # It cannot be below about 1, see `test_balance_by_hand`.
  assert before['load_balance'] > 1.2 > 1.1 > after['load_balance']
  assert after['dropped'] <= before['dropped']


def test_the_router_is_float32_in_a_bfloat16_model():
  exact, rounded = make_layer(), make_layer(dtype=jnp.dtype('bfloat16'))
  # Of tokens that bfloat16 can hold, both see the same.
  x = jax.random.normal(jax.random.key(1), (2, 5, WIDTH)).astype(jnp.bfloat16)
  update, extra = run(rounded, x)
  expected, expected_extra = run(exact, x.astype(jnp.float32))
  assert update.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    extra.metrics['router_z'], expected_extra.metrics['router_z'], rtol=1e-6
  )
  # Three products, each rounded to 8 bits.
  np.testing.assert_allclose(
    update.astype(jnp.float32), expected, rtol=0.05, atol=0.02
  )
