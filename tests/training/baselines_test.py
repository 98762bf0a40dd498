"""Data parallelism is one large batch, to rounding."""

import functools

import jax
import numpy as np
import pytest
from jax._src import distributed
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
def empty_cache(tmp_path):
  """JAX's cache of compiled code in a folder of its own."""
  before = jax.config.values['jax_compilation_cache_dir']
  jax.config.update('jax_compilation_cache_dir', str(tmp_path))
  compilation_cache.reset_cache()  # So that it looks at that again.
  yield tmp_path
  jax.config.update('jax_compilation_cache_dir', before)
  compilation_cache.reset_cache()


def test_every_process_finds_its_compiled_step_again(empty_cache, monkeypatch):
  task = language_model_task(MODEL)
  batches = batch(0)
  monkeypatch.setattr(distributed.global_state, 'process_id', 1)
  # What JAX does by itself: only the first process writes.
  baselines.data_parallel(task, INNER).compile(batches)
  assert not list(empty_cache.glob('*-cache'))
  baselines.compile_step(baselines.data_parallel(task, INNER), batches)
  [kept] = empty_cache.glob('*-cache')
  assert 'scan' in kept.name
  assert distributed.global_state.process_id == 1
  baselines.compile_step(baselines.data_parallel(task, INNER), batches)
  assert list(empty_cache.glob('*-cache')) == [kept]
