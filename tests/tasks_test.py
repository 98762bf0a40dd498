"""Tasks: what is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from decoupled_diloco import tasks
from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.models.vit import VitOptions

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


def test_nnx_evaluates_with_its_own_function():
  task = tasks.nnx_task(
    lambda rngs: nnx.Dropout(0.5, rngs=rngs),
    lambda module, batch, _: squared(module(batch['x']), batch),
    evaluate_fn=lambda module, batch, _: (
      10.0 + squared(module(batch['x']), batch)
    ),
  )
  # In evaluation mode nothing is dropped: the mean of 1, and 10.
  assert task.evaluate({}, BATCH, RNG)[0] == 11.0
  assert task.loss({}, BATCH, jax.random.key(3))[0] not in (1.0, 11.0)


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


def test_penalties_of_experts_are_trained_on_and_not_evaluated():
  options = dataclasses.replace(
    OPTIONS, num_experts=4, load_balance_weight=0.5, router_z_weight=0.25
  )
  task = tasks.language_model_task(options)
  params = jax.jit(task.init)(RNG)
  batch = {'tokens': jax.random.randint(jax.random.key(1), (2, 9), 0, 16)}
  loss, metrics = jax.jit(task.loss)(params, batch, RNG)
  # One layer: its metrics are the sum that the penalty weighs.
  np.testing.assert_allclose(
    loss,
    metrics['cross_entropy']
    + 0.5 * metrics['load_balance']
    + 0.25 * metrics['router_z'],
    rtol=1e-6,
  )
  evaluated, its_metrics = jax.jit(task.evaluate)(params, batch, RNG)
  np.testing.assert_allclose(evaluated, metrics['cross_entropy'], rtol=1e-6)
  assert its_metrics.keys() == metrics.keys()
  assert metrics['dropped'] < 1.0


VIT = VitOptions(width=16, layers=1, heads=2, image_size=4, num_classes=3)
IMAGES = {
  'image': jax.random.normal(jax.random.key(1), (4, 4, 4, 1)),
  'label': jnp.array([0, 1, 2, 2], jnp.int32),
}


def test_images_are_classified():
  task = tasks.image_task(VIT)
  assert task.num_tokens(IMAGES) == 4
  params = jax.jit(task.init)(RNG)
  # With all other weights of the head zero, the bias alone is the logits: class
  # 2 wins for all images, and is right for two of four.
  params['head']['bias'] = jnp.array([0.0, 0.0, 1.0])
  loss, metrics = jax.jit(task.loss)(params, IMAGES, RNG)
  log_sum = np.log(2 + np.e)
  # The logits of the labels 0, 1, 2, 2 are 0, 0, 1, 1.
  np.testing.assert_allclose(loss, log_sum - 2 / 4, rtol=1e-6)
  assert metrics['accuracy'] == 0.5
  np.testing.assert_allclose(metrics['cross_entropy'], loss)
  np.testing.assert_allclose(task.evaluate(params, IMAGES, RNG)[0], loss)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'image': jnp.zeros((4, 4, 4))}, r'\[batch, 4, 4, 1\] but is \(4, 4, 4\)'),
    ({'image': jnp.zeros((4, 4, 4, 3))}, r'but is \(4, 4, 4, 3\); set'),
    ({'image': jnp.zeros((4, 4, 4, 1), jnp.uint8)}, 'floats but is uint8'),
    ({'label': jnp.zeros((3,), jnp.int32)}, r'but is int32 \(3,\)'),
    ({'label': jnp.zeros((4,))}, r'\(4,\) integers, .* but is float32'),
  ],
)
def test_image_batches_are_checked(changes, message):
  task = tasks.image_task(VIT)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(
      task.loss, jax.eval_shape(task.init, RNG), IMAGES | changes, RNG
    )
