"""Tasks: what is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from decoupled_diloco import tasks
from decoupled_diloco.models.transformer import TransformerOptions

RNG = jax.random.key(0)
BATCH = {'x': jnp.ones((4, 2)), 'y': jnp.zeros((4, 1))}
OPTIONS = TransformerOptions(
  vocab_size=16, width=16, layers=1, heads=2, sequence_length=8
)


def squared(output, batch):
  return jnp.mean((output - batch['y']) ** 2)


TASKS = {
  'nnx': lambda: tasks.nnx_task(
    lambda rngs: nnx.Linear(2, 1, rngs=rngs),
    lambda module, batch, _: squared(module(batch['x']), batch),
  ),
  'linen': lambda: tasks.linen_task(
    linen.Dense(1),
    lambda apply, batch, _: squared(apply(batch['x']), batch),
    BATCH,
  ),
  'jax': lambda: tasks.jax_task(
    lambda rng: {
      'kernel': jax.random.normal(rng, (2, 1)),
      'bias': jnp.zeros((1,)),
    },
    lambda params, batch, _: squared(
      batch['x'] @ params['kernel'] + params['bias'][None], batch
    ),
  ),
}


@pytest.mark.parametrize('name', TASKS)
def test_every_kind_of_model_is_the_same_task(name):
  task = TASKS[name]()
  params = jax.jit(task.init)(RNG)
  assert jax.tree.map(jnp.shape, params) == {'kernel': (2, 1), 'bias': (1,)}
  # x = 1 and y = 0: the loss is (k0 + k1 + b)^2, its gradient twice the root.
  (loss, metrics), gradient = jax.value_and_grad(task.loss, has_aux=True)(
    params, BATCH, RNG
  )
  root = jnp.sum(params['kernel']) + params['bias'][0]
  np.testing.assert_allclose(loss, root**2, rtol=1e-6)
  np.testing.assert_allclose(gradient['bias'], 2 * root[None], rtol=1e-6)
  assert metrics == {}
  np.testing.assert_allclose(task.evaluate(params, BATCH, RNG)[0], loss)
  assert task.logical_axes() == {'kernel': None, 'bias': None}
  assert task.num_tokens(BATCH) == 4


def test_metrics_of_the_loss_are_passed_on():
  task = tasks.nnx_task(
    lambda rngs: nnx.Linear(2, 1, rngs=rngs),
    lambda module, batch, _: (jnp.sum(module(batch['x'])), {'one': 1.0}),
  )
  assert task.loss(task.init(RNG), BATCH, RNG)[1] == {'one': 1.0}


def test_linen_evaluates_with_its_own_function():
  def loss_fn(apply, batch, _):
    return squared(apply(batch['x'], deterministic=False), batch)

  def evaluate_fn(apply, batch, _):
    return squared(apply(batch['x'], deterministic=True), batch)

  task = tasks.linen_task(
    linen.Dropout(0.5), loss_fn, BATCH, evaluate_fn=evaluate_fn
  )
  assert task.evaluate({}, BATCH, RNG)[0] == 1.0
  # Half of the entries are dropped, the others doubled: 4 or 0.
  assert task.loss({}, BATCH, jax.random.key(3))[0] != 1.0


def test_language_model_counts_targets_and_masks_them():
  task = tasks.language_model_task(OPTIONS)
  params = jax.jit(task.init)(RNG)
  tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 16)
  assert task.num_tokens({'tokens': tokens}) == 16
  loss = jax.jit(task.loss)

  def masked(mask):
    return loss(params, {'tokens': tokens, 'mask': mask}, RNG)

  whole, metrics = loss(params, {'tokens': tokens}, RNG)
  assert metrics['tokens'] == 16
  np.testing.assert_allclose(metrics['cross_entropy'], whole)
  left = jnp.zeros((2, 8)).at[:, :2].set(1.0)
  (a, a_metrics), (b, b_metrics) = masked(left), masked(1.0 - left)
  # 4 targets on the left and 12 on the right make up the 16.
  assert (a_metrics['tokens'], b_metrics['tokens']) == (4, 12)
  np.testing.assert_allclose((4 * a + 12 * b) / 16, whole, rtol=1e-6)
  assert masked(jnp.zeros((2, 8)))[0] == 0.0


@pytest.mark.parametrize(
  ('batch', 'message'),
  [
    ({'tokens': jnp.zeros((2, 10), jnp.int32)}, r'sequence_length \+ 1 = 9'),
    ({'tokens': jnp.zeros((9,), jnp.int32)}, r'is \(9,\)'),
    ({'tokens': jnp.zeros((2, 9))}, 'must be integers but is float32'),
    (
      {'tokens': jnp.zeros((2, 9), jnp.int32), 'mask': jnp.ones((2, 9))},
      r'must be \(2, 8\)',
    ),
  ],
)
def test_language_model_batches_are_checked(batch, message):
  task = tasks.language_model_task(OPTIONS)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(task.loss, jax.eval_shape(task.init, RNG), batch, RNG)
