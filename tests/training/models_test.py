"""Experts and images in the jitted scan, on eight virtual devices."""

import functools

import jax
import numpy as np
import pytest

from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.models.vit import VitOptions
from decoupled_diloco.tasks import image_task, language_model_task
from decoupled_diloco.training import inner, step
from decoupled_diloco.training import mesh as meshes

# So few slots that some choices are dropped.
EXPERTS = TransformerOptions(
  vocab_size=32,
  width=32,
  layers=2,
  heads=4,
  kv_heads=2,
  mlp_width=16,
  sequence_length=16,
  scan_layers=True,
  num_experts=4,
  capacity_factor=1.0,
)
INNER = inner.InnerOptions(warmup_steps=2, decay_steps=20)
RNG = jax.random.key(0)
K = 4
TASKS = {
  'experts': language_model_task(EXPERTS),
  'images': image_task(VitOptions(width=32, layers=1)),
}


def make_batches(name: str, seed: int):
  rng = np.random.default_rng(seed)
  if name == 'experts':
    return {'tokens': rng.integers(0, 32, (K, 8, 17), np.int32)}
  return {
    'image': rng.random((K, 8, 8, 8, 1), np.float32),
    'label': rng.integers(0, 10, (K, 8), np.int32),
  }


@functools.cache
def train(name: str, *shape: int):
  """Losses of eight steps, and the state and metrics of the last scan."""
  trainer = step.make_train_scan(
    TASKS[name],
    inner.inner_optimizer(INNER),
    meshes.make_mesh(meshes.MeshOptions(*shape)),
    steps_per_scan=K,
    learning_rate=functools.partial(inner.learning_rate, INNER),
  )
  losses = []
  with jax.default_matmul_precision('highest'):
    state = trainer.init_state(RNG)
    for round_number in range(2):
      state, metrics = trainer.scan(
        state, make_batches(name, round_number), round_number * K
      )
      losses.append(np.array(metrics['losses']))
  return np.concatenate(losses), state, metrics


@pytest.mark.parametrize('shape', [(2, 2, 2), (1, 4, 2)])
@pytest.mark.parametrize('name', TASKS)
def test_meshes_train_alike(name, shape):
  expected, _, expected_metrics = train(name, 1, 1, 1)
  losses, _, metrics = train(name, *shape)
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  for name, value in expected_metrics.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-5)


def test_experts_lie_whole_and_their_metrics_are_means_over_the_scan():
  _, state, metrics = train('experts', 1, 4, 2)
  # So the meshes above agree about what is dropped, too.
  assert 0.0 < metrics['dropped'] < 1.0
  # Losses hold the penalty, of two layers; the weights are the defaults.
  penalty = 2 * (0.01 * metrics['load_balance'] + 0.001 * metrics['router_z'])
  np.testing.assert_allclose(
    metrics['loss'], metrics['cross_entropy'] + penalty, rtol=1e-6
  )
  leaf = state.params['layers']['mlp']['experts']['up']['kernel']
  # 2 layers of 4 experts, 32 x 16, on 4 x 2 devices.
  assert leaf.addressable_shards[0].data.shape == (2, 2, 8, 16)
