"""Data parallelism is one large batch, to rounding."""

import functools

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.tasks import language_model_task
from decoupled_diloco.training import baselines, inner
from decoupled_diloco.training.mesh import MeshOptions, make_mesh
from decoupled_diloco.training.step import make_train_scan

MODEL = TransformerOptions(
  vocab_size=32, width=32, layers=1, heads=4, kv_heads=2, sequence_length=16
)
INNER = inner.InnerOptions(warmup_steps=2, decay_steps=20)


def batch(seed: int):
  tokens = np.random.default_rng(seed).integers(0, 32, (1, 8, 17), np.int32)
  return {'tokens': tokens}


@pytest.mark.skipif(jax.device_count() != 8, reason='needs eight devices')
def test_all_devices_together_take_the_step_of_one():
  task = language_model_task(MODEL)
  together = baselines.data_parallel(task, INNER)
  alone = make_train_scan(
    task,
    inner.inner_optimizer(INNER),
    make_mesh(MeshOptions()),
    steps_per_scan=1,
    learning_rate=functools.partial(inner.learning_rate, INNER),
  )
  assert together.mesh.shape['data'] == 8
  key = jax.random.key(0)
  one, other = together.init_state(key), alone.init_state(key)
  with jax.default_matmul_precision('highest'):
    for step in range(4):
      one, metrics = together.scan(one, together.place(batch(step)), step)
      other, expected = alone.scan(other, batch(step), step)
      np.testing.assert_allclose(metrics['loss'], expected['loss'], rtol=1e-5)
      np.testing.assert_allclose(
        metrics['grad_norm'], expected['grad_norm'], rtol=1e-5
      )


@pytest.fixture
def no_cache():
  """What comes from JAX's cache could not be written into a file again."""
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()  # So that it looks at that again.
  yield
  jax.config.update('jax_enable_compilation_cache', True)
  compilation_cache.reset_cache()


@pytest.mark.usefixtures('no_cache')
def test_a_compiled_step_is_kept_in_a_file(tmp_path):
  task = language_model_task(MODEL)
  trainer = baselines.data_parallel(task, INNER)
  path = tmp_path / 'step.bin'
  batches = trainer.place(batch(0))
  compiled = baselines.compiled_step(trainer, batches, path)
  [kept] = tmp_path.iterdir()
  assert kept == path
  again = baselines.data_parallel(task, INNER)
  loaded = baselines.compiled_step(again, batches, path)
  assert not again._compiled  # Nothing was.
  key = jax.random.key(0)
  one, metrics = compiled(trainer.init_state(key), batches, np.int32(3))
  state = again.init_state(key)
  other, expected = loaded(state, batches, np.int32(3))
  np.testing.assert_array_equal(metrics['loss'], expected['loss'])
  jax.tree.map(np.testing.assert_array_equal, one, other)
  # It is donated as ever.
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
