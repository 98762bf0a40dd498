"""What is trained: a task gives parameters and a loss.

Any Flax module trains unchanged through `nnx_task` or `linen_task`;
`language_model_task` is the transformer on next-token prediction, `image_task`
the vision transformer on classification.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jaxtyping import Array, Float

from decoupled_diloco.models import functional, layers, transformer, vit
from decoupled_diloco.ops.array_types import Params

Batch = Any
Metrics = dict[str, Float[Array, '']]
LossAndMetrics = tuple[Float[Array, ''], Metrics]


@dataclasses.dataclass(frozen=True)
class Task:
  """A model and its loss, as pure functions.

  Attributes:
    init: `init(rng) -> params`, a pytree of arrays.
    loss: `loss(params, batch, rng) -> (loss, metrics)`: the scalar float32
      loss to descend, in training mode, and scalar metrics.
    evaluate: the same in evaluation mode: no dropout, and no penalties that
      only steer training. A metric named 'tokens' says over how many tokens
      the loss is a mean.
    logical_axes: `logical_axes() -> pytree` like params, whose leaves are
      tuples of one logical axis name (or None) a dimension, or None.
    num_tokens: `num_tokens(batch) -> int`: tokens, or examples, in a batch;
      from the shapes alone, so that it costs nothing.
  """

  init: Callable[[jax.Array], Params]
  loss: Callable[[Params, Batch, jax.Array], LossAndMetrics]
  evaluate: Callable[[Params, Batch, jax.Array], LossAndMetrics]
  logical_axes: Callable[[], Any]
  num_tokens: Callable[[Batch], int]


def count_examples(batch: Batch) -> int:
  """Length of the leading axis: the tokens of a task without tokens."""
  return jax.tree.leaves(batch)[0].shape[0]


def jax_task(
  init: Callable[[jax.Array], Params],
  loss_fn: Callable[[Params, Batch, jax.Array], Any],
  *,
  evaluate_fn: Callable[[Params, Batch, jax.Array], Any] | None = None,
  logical_axes: Callable[[], Any] | None = None,
  num_tokens: Callable[[Batch], int] = count_examples,
) -> Task:
  """A task from plain functions, without any module.

  `loss_fn(params, batch, rng)` returns the loss, or the loss and a dict of
  scalar metrics. For the others see `Task`; without `logical_axes` every
  parameter is sharded by its shape alone.
  """
  evaluator = loss_fn if evaluate_fn is None else evaluate_fn

  def no_axes() -> Any:
    return jax.tree.map(lambda _: None, jax.eval_shape(init, jax.random.key(0)))

  return Task(
    init=init,
    loss=lambda params, batch, rng: _with_metrics(loss_fn(params, batch, rng)),
    evaluate=lambda params, batch, rng: _with_metrics(
      evaluator(params, batch, rng)
    ),
    logical_axes=no_axes if logical_axes is None else logical_axes,
    num_tokens=num_tokens,
  )


def nnx_task(
  build: Callable[[nnx.Rngs], Any],
  loss_fn: Callable[..., Any],
  *,
  evaluate_fn: Callable[..., Any] | None = None,
  num_tokens: Callable[[Batch], int] = count_examples,
) -> Task:
  """A task from a Flax nnx module.

  Args:
    build: `build(rngs) -> nnx.Module`.
    loss_fn: `loss_fn(module, batch, rng)` returns the loss, or the loss and a
      dict of scalar metrics. The module's own random streams (dropout) are
      seeded afresh in every step.
    evaluate_fn: the same for evaluation, where the loss is another one there;
      by default `loss_fn`. The module is in evaluation mode in either case.
    num_tokens: see `Task`.

  Raises:
    ValueError: if the module has state besides parameters and random streams
      (BatchNorm).

  Example:
    >>> def loss_fn(module, batch, rng):
    ...   return jnp.mean((module(batch['x']) - batch['y']) ** 2)
    >>> task = nnx_task(lambda rngs: nnx.Linear(2, 1, rngs=rngs), loss_fn)
    >>> sorted(task.init(jax.random.key(0)))
    ['bias', 'kernel']
  """
  model = functional.functional(build)
  evaluator = loss_fn if evaluate_fn is None else evaluate_fn

  def run(params, batch, rng, train) -> LossAndMetrics:
    stream, own = jax.random.split(rng)
    module = model.module(params, stream, train)
    function = loss_fn if train else evaluator
    return _with_metrics(function(module, batch, own))

  return Task(
    init=model.init,
    loss=lambda params, batch, rng: run(params, batch, rng, True),
    evaluate=lambda params, batch, rng: run(params, batch, rng, False),
    logical_axes=lambda: model.logical_axes,
    num_tokens=num_tokens,
  )


def linen_task(
  module: linen.Module,
  loss_fn: Callable[..., Any],
  example_batch: Batch,
  *,
  evaluate_fn: Callable[..., Any] | None = None,
  num_tokens: Callable[[Batch], int] = count_examples,
) -> Task:
  """A task from a Flax linen module.

  Args:
    module: the module.
    loss_fn: `loss_fn(apply, batch, rng)` returns the loss, or the loss and a
      dict of scalar metrics; `apply(*args, **kwargs)` calls the module.
    example_batch: arrays, or `jax.ShapeDtypeStruct`s, shaped like a batch;
      only shapes and dtypes are used.
    evaluate_fn: the same in evaluation mode, where the module has one
      (`apply(x, deterministic=True)`); by default `loss_fn`.
    num_tokens: see `Task`.

  Raises:
    ValueError: if the module has variables besides parameters (BatchNorm).

  Example:
    >>> def loss_fn(apply, batch, rng):
    ...   return jnp.mean((apply(batch['x']) - batch['y']) ** 2)
    >>> batch = {'x': jnp.ones((8, 2)), 'y': jnp.ones((8, 1))}
    >>> task = linen_task(linen.Dense(1), loss_fn, batch)
    >>> sorted(task.init(jax.random.key(0)))
    ['bias', 'kernel']
  """
  model = functional.linen_functional(module, loss_fn, example_batch)
  evaluator = model
  if evaluate_fn is not None:
    evaluator = functional.linen_functional(module, evaluate_fn, example_batch)

  return Task(
    init=model.init,
    loss=lambda params, batch, rng: _with_metrics(
      model.call(params, batch, rng)
    ),
    evaluate=lambda params, batch, rng: _with_metrics(
      evaluator.call(params, batch, rng)
    ),
    logical_axes=lambda: model.logical_axes,
    num_tokens=num_tokens,
  )


def language_model_task(options: transformer.TransformerOptions) -> Task:
  """Next-token prediction with a `Transformer`.

  A batch is `{'tokens': int32 [batch, sequence + 1]}`, and optionally
  `'mask'` [batch, sequence], 1 where a target (`tokens[:, 1:]`) counts. The
  metrics are 'cross_entropy', 'tokens', and those of the experts, if there are
  any (see `models.moe.Routing`).
  """

  def measure(model: transformer.Transformer, batch: Batch) -> _Measured:
    _check_tokens(batch, options)
    tokens = batch['tokens']
    logits, extra = model.logits_and_extra(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
    )
    if 'mask' in batch:
      mask = batch['mask'].astype(jnp.float32)
      count = jnp.sum(mask)
      # A batch without any target has loss 0, not NaN.
      cross_entropy = jnp.sum(losses * mask) / jnp.maximum(count, 1.0)
    else:
      count = jnp.asarray(losses.size, jnp.float32)
      cross_entropy = jnp.mean(losses)
    return cross_entropy, {'tokens': count}, extra

  return _cross_entropy_task(
    lambda rngs: transformer.Transformer(options, rngs=rngs),
    measure,
    num_tokens=lambda batch: (
      batch['tokens'].shape[0] * (batch['tokens'].shape[1] - 1)
    ),
  )


def image_task(options: vit.VitOptions) -> Task:
  """Classification of images with a `Vit`.

  A batch is `{'image': float [batch, height, width, channel], 'label': integer
  [batch]}`; an image counts as one token. The metrics are 'cross_entropy',
  'accuracy' (share of images whose most likely class is the label), and those
  of the experts, if there are any.
  """

  def measure(model: vit.Vit, batch: Batch) -> _Measured:
    _check_images(batch, options)
    labels = batch['label'].astype(jnp.int32)
    logits, extra = model.logits_and_extra(batch['image'])
    cross_entropy = jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    )
    is_right = jnp.argmax(logits, axis=-1).astype(jnp.int32) == labels
    accuracy = jnp.mean(is_right.astype(jnp.float32))
    return cross_entropy, {'accuracy': accuracy}, extra

  return _cross_entropy_task(lambda rngs: vit.Vit(options, rngs=rngs), measure)


_Measured = tuple[Float[Array, ''], Metrics, layers.Extra]


def _cross_entropy_task(
  build: Callable[[nnx.Rngs], Any],
  measure: Callable[[Any, Batch], _Measured],
  *,
  num_tokens: Callable[[Batch], int] = count_examples,
) -> Task:
  """A task that trains on the cross entropy plus the layers' penalty."""

  def run(model: Any, batch: Batch, penalty_weight: float) -> LossAndMetrics:
    cross_entropy, metrics, extra = measure(model, batch)
    metrics = {'cross_entropy': cross_entropy, **metrics, **extra.metrics}
    return cross_entropy + penalty_weight * extra.penalty, metrics

  return nnx_task(
    build,
    lambda model, batch, _: run(model, batch, 1.0),
    evaluate_fn=lambda model, batch, _: run(model, batch, 0.0),
    num_tokens=num_tokens,
  )


def _check_tokens(batch: Batch, options: transformer.TransformerOptions):
  tokens = batch['tokens']
  longest = options.sequence_length + 1
  if tokens.ndim != 2 or not 2 <= tokens.shape[1] <= longest:
    raise ValueError(
      f"batch['tokens'] must be [batch, 2 to sequence_length + 1 = {longest}] "
      f'but is {tuple(tokens.shape)}; cut the sequences, or raise '
      'sequence_length.'
    )
  if not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise ValueError(
      f"batch['tokens'] must be integers but is {tokens.dtype}; use int32."
    )
  targets = (tokens.shape[0], tokens.shape[1] - 1)
  if 'mask' in batch and tuple(batch['mask'].shape) != targets:
    raise ValueError(
      f"batch['mask'] must be {targets}, one for each target tokens[:, 1:], "
      f'but is {tuple(batch["mask"].shape)}; drop the first column.'
    )


def _check_images(batch: Batch, options: vit.VitOptions):
  shape = tuple(batch['image'].shape)
  expected = (options.image_size, options.image_size, options.channels)
  if len(shape) != 4 or shape[1:] != expected:
    raise ValueError(
      f"batch['image'] must be [batch, image_size, image_size, channels] = "
      f'[batch, {", ".join(map(str, expected))}] but is {shape}; set the '
      'options to the shape of the images.'
    )
  if not jnp.issubdtype(batch['image'].dtype, jnp.floating):
    raise ValueError(
      f"batch['image'] must be floats but is {batch['image'].dtype}; scale "
      'the pixels to [0, 1] as float32.'
    )
  labels = batch['label']
  if tuple(labels.shape) != shape[:1] or not jnp.issubdtype(
    labels.dtype, jnp.integer
  ):
    raise ValueError(
      f"batch['label'] must be {shape[:1]} integers, one for each image, but "
      f'is {labels.dtype} {tuple(labels.shape)}; pass class numbers as int32.'
    )


def _with_metrics(result: Any) -> LossAndMetrics:
  loss, metrics = result if isinstance(result, tuple) else (result, {})
  return loss.astype(jnp.float32), dict(metrics)
