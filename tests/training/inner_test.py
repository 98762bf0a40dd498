"""The inner optimizer and its learning rate."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco.training import inner

OPTIONS = inner.InnerOptions(
  learning_rate=1.0,
  warmup_steps=4,
  decay_steps=12,
  final_fraction=0.2,
  rejoin_warmup_steps=0,
)


def rates(options, steps, rejoin_step=inner.NEVER):
  compute = jax.jit(lambda s: inner.learning_rate(options, s, rejoin_step))
  return [float(compute(step)) for step in steps]


@pytest.mark.parametrize(
  ('decay', 'middle', 'end'),
  # Half way between step 4 and step 12 all curves are half way down from 1
  # to 0.2: at 0.6.
  [('cosine', 0.6, 0.2), ('linear', 0.6, 0.2), ('constant', 1.0, 1.0)],
)
def test_learning_rate(decay, middle, end):
  options = dataclasses.replace(OPTIONS, decay=decay)
  found = rates(options, [0, 1, 2, 3, 4, 8, 12, 100])
  expected = [0.25, 0.5, 0.75, 1.0, 1.0, middle, end, end]
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_no_warmup_starts_at_the_peak():
  options = dataclasses.replace(OPTIONS, warmup_steps=0)
  assert rates(options, [0]) == [1.0]


def test_a_rejoining_learner_warms_up_towards_the_run():
  options = dataclasses.replace(
    OPTIONS, decay='constant', rejoin_warmup_steps=4
  )
  # It rejoins at step 100: 1/4, 2/4, 3/4 and then all of the run's rate.
  assert rates(options, range(100, 106), 100) == [0.25, 0.5, 0.75, 1, 1, 1]
  assert rates(options, [100]) == [1.0]


def test_adamw_is_that_of_optax():
  options = inner.InnerOptions(clip_norm=1.0, weight_decay=0.1)
  tx = inner.inner_optimizer(options)
  reference = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(0.5, b1=0.9, b2=0.99, weight_decay=0.1),
  )
  params = {'a': jnp.array([1.0, -2.0]), 'b': jnp.array([3.0])}
  state, expected_state = tx.init(params), reference.init(params)
  with jax.numpy_dtype_promotion('standard'):
    for scale in (0.1, 10.0):
      gradient = jax.tree.map(lambda x, scale=scale: scale * x, params)
      state = inner.set_learning_rate(state, jnp.float32(0.5))
      updates, state = tx.update(gradient, state, params)
      expected, expected_state = reference.update(
        gradient, expected_state, params
      )
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        updates,
        expected,
      )


def test_sgd_and_lion():
  params, gradient = jnp.array([1.0]), jnp.array([0.5])
  plain = inner.InnerOptions(
    optimizer='sgd', learning_rate=0.1, b1=0.0, weight_decay=0, clip_norm=0
  )
  tx = inner.inner_optimizer(plain)
  updates: Any = tx.update(gradient, tx.init(params), params)[0]
  np.testing.assert_allclose(updates, -0.1 * 0.5, rtol=1e-6)
  tx = inner.inner_optimizer(dataclasses.replace(plain, optimizer='lion'))
  updates = tx.update(gradient, tx.init(params), params)[0]
  np.testing.assert_allclose(updates, -0.1, rtol=1e-6)  # the sign


def test_every_injected_learning_rate_is_set_and_nothing_else():
  tx = optax.chain(
    optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.5),
    optax.adam(1.0),
  )
  # A parameter of that name is not a learning rate.
  state: Any = tx.init({'learning_rate': jnp.ones(2)})
  changed = inner.set_learning_rate(state, jnp.float32(0.25))
  assert changed[0].hyperparams == {'learning_rate': 0.25, 'momentum': 0.5}
  jax.tree.map(np.testing.assert_array_equal, changed[1], state[1])
  jax.tree.map(
    np.testing.assert_array_equal, changed[0].inner_state, state[0].inner_state
  )


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'optimizer': 'adam'}, "'adamw', 'lion', 'sgd'"),
    ({'decay': 'step'}, "'cosine', 'linear', 'constant'"),
    ({'learning_rate': 0.0}, 'learning_rate=0.0 must be above 0'),
    ({'b2': 1.0}, r'b2=1.0 must be in \[0, 1\)'),
    ({'clip_norm': -1.0}, 'clip_norm=-1.0 must not be negative'),
    ({'final_fraction': 2.0}, r'final_fraction=2.0 must be in \[0, 1\]'),
    ({'decay_steps': 4}, 'decay_steps=4 must exceed warmup_steps=4'),
  ],
)
def test_options_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(OPTIONS, **changes)
