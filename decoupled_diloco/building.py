"""What both roles of a run build from its options: task, fragments, data."""

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from decoupled_diloco import data, tasks
from decoupled_diloco.data import sources
from decoupled_diloco.ops.fragments import FragmentPlan, fragment
from decoupled_diloco.run_options import RunOptions


def check(options: RunOptions, learners: Sequence[RunOptions]) -> None:
  """Finds out what can be known before any process starts, in about a second.

  Text is looked for, but not read: how much there is, is found out later.

  Args:
    options: of the syncer.
    learners: of each learner.

  Raises:
    ValueError: if the options do not fit the model or the data.
  """
  known = fitted_to_data(options)
  build_plan(known, build_task(known))
  if options.task == 'image':
    return  # They have been opened.
  with _of('config.data'):
    for source in {each.data.source for each in (options, *learners)}:
      names = (source,) if isinstance(source, str) else source
      files = sources.find_files(names)
      if not any(file.size_bytes for file in files):
        raise ValueError(
          f'source={", ".join(names)} must hold text, and its files, '
          f'{len(files)} of them, are empty; choose other files.'
        )


def build_task(options: RunOptions) -> tasks.Task:
  """The task that the options name.

  Raises:
    ValueError: if it cannot be imported, or is none. What goes wrong inside of
      somebody's function is raised as it is: they need the traceback.
  """
  if options.task == 'language_model':
    return tasks.language_model_task(options.model)
  if options.task == 'image':
    return tasks.image_task(options.vit)
  module, _, name = options.task.partition(':')
  try:
    function = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, SyntaxError, ValueError) as error:
    raise _no_task(options, str(error)) from error
  try:
    task = function(options)
  except Exception as error:
    assert error.__traceback__ is not None
    if error.__traceback__.tb_next is not None:
      raise  # From within the function.
    raise _no_task(options, str(error)) from error
  if not isinstance(task, tasks.Task):
    raise _no_task(options, f'it returned a {type(task).__name__}')
  return task


def _no_task(options: RunOptions, why: str) -> ValueError:
  return ValueError(
    f"config.task={options.task!r} must be 'language_model', 'image' or "
    "'package.module:function', a function from the run's options to a "
    f'tasks.Task ({why}); correct it.'
  )


def build_plan(options: RunOptions, task: tasks.Task) -> FragmentPlan:
  """How the task's parameters are divided into fragments.

  Raises:
    ValueError: if there are fewer pieces than fragments.
  """
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  with _of('config.schedule, config.fragments'):
    return fragment(
      shapes,
      num_fragments=options.schedule.num_fragments,
      pattern=options.fragments.pattern,
    )


def fitted_to_data(options: RunOptions) -> RunOptions:
  """The options with what the model has to know of the data.

  That is the vocabulary of the tokenizer, or the size and the classes of the
  images.

  Raises:
    ValueError: if there is no such tokenizer, or there are no such images.
  """
  if options.task == 'image':
    with _of('config.images'):
      images = data.open_images(options.images)
    with _of('config.vit'):
      vit = dataclasses.replace(
        options.vit,
        image_size=images.train.shape[1],
        channels=images.train.shape[-1],
        num_classes=images.num_classes,
      )
    return dataclasses.replace(options, vit=vit)
  with _of('config.data'):
    tokenizer = data.open_tokenizer(options.data.tokenizer)
  model = dataclasses.replace(options.model, vocab_size=tokenizer.vocab_size)
  return dataclasses.replace(options, model=model)


def open_pipeline(
  options: RunOptions,
) -> data.TextPipeline | data.ImagePipeline:
  """The batches of this learner.

  Raises:
    ValueError: if there is not enough text, or there are too few images.
  """
  if options.task == 'image':
    with _of('config.images'):
      return data.ImagePipeline(options.images, options.learner)
  with _of('config.data'):
    return data.TextPipeline(options.data, options.learner)


def held_out(options: RunOptions) -> dict[str, np.ndarray] | None:
  """The batches that the global model is measured on; None for none.

  Raises:
    ValueError: if there is not enough text, or there are too few images.
  """
  count = options.evaluation.batches
  if not count:
    return None
  is_image = options.task == 'image'
  name = 'config.images' if is_image else 'config.data'
  with _of(f'{name}, with num_batches from config.evaluation.batches'):
    if is_image:
      return data.held_out_image_batches(options.images, count)
    return data.held_out_batches(options.data, count)


def clock(began_at: float | None = None) -> Callable[[], float]:
  """A clock that began at 0 at this Unix time, never before now; or now."""
  elapsed = 0.0 if began_at is None else max(time.time() - began_at, 0.0)
  start = time.monotonic() - elapsed
  return lambda: time.monotonic() - start


@contextlib.contextmanager
def _of(sections: str) -> Iterator[Any]:
  """Says of an error in which sections of the config its fields are."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{sections}: {error}') from error
