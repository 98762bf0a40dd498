"""What a run has made, measured when it ends: held-out loss, and a sample."""

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from decoupled_diloco import data, tasks
from decoupled_diloco.models import sampling
from decoupled_diloco.run_options import RunOptions
from decoupled_diloco.training import evaluation

_T = TypeVar('_T')


class Measures(NamedTuple):
  """What was measured; nothing where it was not asked for, or broken off.

  Attributes:
    loss_start, loss_end: held-out loss of the global model in nats per token,
      before and after; None also if it is not finite.
    sample: text from the trained model.
  """

  loss_start: float | None = None
  loss_end: float | None = None
  sample: str = ''


def measure(
  options: RunOptions,
  task: tasks.Task,
  initial: Any,
  final: Any,
  held_out: Any,
  *,
  tell: Callable[[str], None],
  is_unwanted: Callable[[], bool],
) -> Measures:
  """Measures the global model before and after the run.

  Args:
    options: of the run.
    task: what was trained.
    initial, final: parameters before and after.
    held_out: batches [batches, ...] for the loss; None for none.
    tell: is told what is being done.
    is_unwanted: whether nobody wants to wait for the rest; see `unless`.
  """
  losses = sample = None
  if held_out is not None:
    tell('Measuring the held-out loss.')
    losses = unless(
      is_unwanted,
      lambda: [loss(task, params, held_out) for params in (initial, final)],
    )
  count = options.evaluation.sample_tokens
  if count and options.task == 'language_model':
    tell(f'Sampling {count} tokens.')
    sample = unless(is_unwanted, lambda: _sample(options, final))
  start, end = losses or (None, None)
  return Measures(start, end, sample or '')


def unless(
  is_unwanted: Callable[[], bool], work: Callable[[], _T]
) -> _T | None:
  """What some work results in; None as soon as nobody wants to wait for it.

  The work is done on another thread, as signals are only heard while the main
  thread does not compute. That thread is abandoned then: leave the process
  without waiting for it.

  Raises:
    BaseException: whatever the work raises.
  """
  if is_unwanted():
    return None
  results: list[_T] = []
  failures: list[BaseException] = []
  is_done = threading.Event()

  def run() -> None:
    try:
      results.append(work())
    except BaseException as error:
      failures.append(error)
    finally:
      is_done.set()

  threading.Thread(target=run, daemon=True).start()
  while not is_done.wait(0.1):
    if is_unwanted():
      return None
  if failures:
    raise failures[0]
  return results[0]


def loss(task: tasks.Task, params: Any, held_out: Any) -> float | None:
  """The held-out loss in nats per token; None if it is not finite.

  Args:
    task: what was trained.
    params: parameters.
    held_out: batches [batches, ...].
  """
  count = jax.tree.leaves(held_out)[0].shape[0]
  found = evaluation.held_out_loss(
    task,
    params,
    (jax.tree.map(lambda leaf, i=i: leaf[i], held_out) for i in range(count)),
  )
  return found if math.isfinite(found) else None


def _sample(options: RunOptions, params: Any) -> str:
  tokenizer = data.open_tokenizer(options.data.tokenizer)
  prompt = jnp.asarray(tokenizer.encode(options.evaluation.prompt), jnp.int32)
  tokens = sampling.sample(
    options.model,
    params,
    prompt[None],
    jax.random.key(options.seed),
    options.evaluation.sample_tokens,
    sampling.SamplingOptions(temperature=options.evaluation.temperature),
  )
  return tokenizer.decode(np.asarray(tokens)[0, prompt.size :])
