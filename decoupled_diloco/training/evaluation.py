"""The loss on data that is not trained on."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from decoupled_diloco.ops.array_types import Params
from decoupled_diloco.tasks import Batch, Task


@functools.partial(jax.jit, static_argnums=0)
def _weighted_loss(
  task: Task, params: Params, batch: Batch
) -> Float[Array, '2']:
  """(loss x tokens, tokens) of one batch."""
  loss, metrics = task.evaluate(params, batch, jax.random.key(0))
  tokens = metrics.get('tokens', jnp.asarray(task.num_tokens(batch)))
  tokens = tokens.astype(jnp.float32)
  return jnp.stack([loss * tokens, tokens])


def held_out_loss(
  task: Task, params: Params, batches: Iterable[Batch]
) -> float:
  """Mean loss over all tokens of all batches, in evaluation mode.

  Args:
    task: what is trained. A batch weighs as much as its metric 'tokens'
      says, without one as `task.num_tokens` says.
    params: parameters, sharded or not; not donated.
    batches: [batch, ...] arrays. Equal shapes compile once.

  Raises:
    ValueError: if there is no batch, or no token counts.
  """
  sums = [_weighted_loss(task, params, batch) for batch in batches]
  # Float64 on the host: float32 would drop tokens from 2**24 on.
  pairs = np.array(jax.device_get(sums), np.float64).reshape(-1, 2)
  total, tokens = pairs[:, 0].sum(), pairs[:, 1].sum()
  if not tokens:
    raise ValueError(
      f'held_out_loss needs at least one counted token, but got {len(sums)} '
      'batches without any; give it another split, or another mask.'
    )
  return float(total / tokens)
