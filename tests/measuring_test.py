"""What is measured at the end, and how it is broken off."""

import threading

import jax.numpy as jnp
import pytest

from decoupled_diloco import configuring, measuring, tasks


@pytest.fixture
def options():
  """Without a sample."""
  config = configuring.default_config()
  config.budget.rounds = 100
  config.evaluation.sample_tokens = 0
  return configuring.options_of(config)


@pytest.fixture
def task():
  """The loss of a batch is parameter x mean of the batch."""
  return tasks.jax_task(
    lambda rng: {'x': jnp.ones(())},
    lambda params, batch, rng: params['x'] * jnp.mean(batch['y']),
  )


def _measure(options, task, held_out, told, is_unwanted=lambda: False):
  return measuring.measure(
    options,
    task,
    {'x': jnp.asarray(3.0)},
    {'x': jnp.asarray(1.0)},
    held_out,
    tell=told.append,
    is_unwanted=is_unwanted,
  )


def test_the_loss_before_and_after(options, task):
  told = []
  held_out = {'y': jnp.array([[1.0, 3.0], [4.0, 8.0]])}
  # The mean of 1, 3, 4 and 8 is 4; times 3, and times 1.
  measures = _measure(options, task, held_out, told)
  assert measures == measuring.Measures(12.0, 4.0, '')
  assert told == ['Measuring the held-out loss.']


def test_a_loss_that_is_not_finite_is_none(options, task):
  held_out = {'y': jnp.array([[jnp.inf, 1.0]])}
  assert _measure(options, task, held_out, []) == measuring.Measures()


def test_nothing_is_measured_if_nothing_is_asked_for(options, task):
  told = []
  assert _measure(options, task, None, told) == measuring.Measures()
  assert told == []


def test_nobody_waits_for_what_is_unwanted(options, task):
  held_out = {'y': jnp.ones((1, 2))}
  measures = _measure(options, task, held_out, [], lambda: True)
  assert measures == measuring.Measures()


def test_work_is_abandoned_in_the_middle():
  has_begun, may_end = threading.Event(), threading.Event()

  def work():
    has_begun.set()
    may_end.wait(60.0)
    return 'too late'

  assert measuring.unless(has_begun.is_set, work) is None
  may_end.set()


def test_a_failure_is_raised_where_it_was_asked_for():
  def work():
    raise KeyError('a bug')

  with pytest.raises(KeyError, match='a bug'):
    measuring.unless(lambda: False, work)
  assert measuring.unless(lambda: False, lambda: 3) == 3
