"""The held-out loss."""

import jax.numpy as jnp
import numpy as np
import pytest

from decoupled_diloco.tasks import jax_task
from decoupled_diloco.training.evaluation import held_out_loss

PARAMS = jnp.zeros(())


def test_batches_weigh_by_their_size():
  task = jax_task(lambda rng: PARAMS, lambda p, batch, rng: jnp.mean(batch))
  # Three examples of loss 1 and one of loss 5: 8 / 4.
  batches = [np.full((3,), 1.0, np.float32), np.full((1,), 5.0, np.float32)]
  assert held_out_loss(task, PARAMS, batches) == 2.0


def test_counted_tokens_go_before_the_shape():
  task = jax_task(
    lambda rng: PARAMS,
    lambda p, batch, rng: (batch[0], {'tokens': batch[1]}),
  )
  # (loss, tokens): (1, 3) and (5, 1), as above.
  batches = [jnp.array([1.0, 3.0]), jnp.array([5.0, 1.0])]
  assert held_out_loss(task, PARAMS, batches) == 2.0
  with pytest.raises(ValueError, match='got 1 batches without any'):
    held_out_loss(task, PARAMS, [jnp.array([1.0, 0.0])])


def test_evaluation_mode_is_used_and_compiled_once():
  traces = []

  def evaluate_fn(params, batch, rng):
    traces.append(1)
    return jnp.mean(batch)

  task = jax_task(
    lambda rng: PARAMS,
    lambda params, batch, rng: jnp.full((), jnp.nan),
    evaluate_fn=evaluate_fn,
  )
  batches = (jnp.full((2,), float(i)) for i in range(3))
  assert held_out_loss(task, PARAMS, batches) == 1.0
  assert len(traces) == 1


def test_no_batches():
  task = jax_task(lambda rng: PARAMS, lambda p, batch, rng: jnp.mean(batch))
  with pytest.raises(ValueError, match='got 0 batches'):
    held_out_loss(task, PARAMS, [])
