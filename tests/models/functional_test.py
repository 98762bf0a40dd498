"""Flax modules as pure functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from decoupled_diloco.models.functional import functional, linen_functional

RNG = jax.random.key(0)
X = jnp.ones((4, 3))


def test_list_indices_become_strings_and_values_are_those_of_the_module():
  def build(rngs):
    return nnx.Sequential(*[nnx.Linear(3, 3, rngs=rngs) for _ in range(11)])

  model = functional(build)
  params = model.init(RNG)
  assert set(params['layers']) == {str(i) for i in range(11)}
  # '10' sorts before '2', yet every layer gets its own parameters back.
  np.testing.assert_allclose(
    model.module(params, RNG, True)(X), build(nnx.Rngs(RNG))(X), rtol=1e-6
  )


def test_a_shared_module_appears_once():
  class Tied(nnx.Module):
    def __init__(self, rngs):
      self.first = nnx.Linear(3, 3, rngs=rngs)
      self.second = self.first

    def __call__(self, x):
      return self.second(self.first(x))

  model = functional(lambda rngs: Tied(rngs))
  params = model.init(RNG)
  assert set(params) == {'first'}
  doubled = {'first': jax.tree.map(lambda w: 2 * w, params['first'])}
  # Both uses see the change: without biases the output is quadratic in it.
  np.testing.assert_allclose(
    model.module(doubled, RNG, True)(X),
    4 * model.module(params, RNG, True)(X),
    rtol=1e-6,
  )


def test_streams_follow_the_key_and_evaluation_has_none():
  def build(rngs):
    return nnx.Dropout(0.5, rngs=rngs)

  model = functional(build)
  x = jnp.ones((64,))
  one, two = (model.module({}, jax.random.key(i), True)(x) for i in (1, 2))
  assert not np.array_equal(one, two)
  np.testing.assert_array_equal(
    one, model.module({}, jax.random.key(1), True)(x)
  )
  np.testing.assert_array_equal(model.module({}, RNG, False)(x), x)


def test_two_streams_of_a_module_differ():
  class Twice(nnx.Module):
    def __init__(self, rngs):
      self.a, self.b = (nnx.Dropout(0.5, rngs=rngs) for _ in range(2))

    def __call__(self, x):
      return self.a(x), self.b(x)

  model = functional(lambda rngs: Twice(rngs))
  a, b = model.module({}, RNG, True)(jnp.ones((64,)))
  assert not np.array_equal(a, b)


def test_constant_arrays_are_not_parameters():
  class Scaled(nnx.Module):
    def __init__(self, rngs):
      self.linear = nnx.Linear(3, 2, rngs=rngs)
      self.jax_scale = jnp.full((1, 2), 2.0)
      self.numpy_scale = np.full((1, 2), 3.0, np.float32)

    def __call__(self, x):
      return self.linear(x) * self.jax_scale * self.numpy_scale

  model = functional(lambda rngs: Scaled(rngs))
  params = model.init(RNG)
  assert set(params) == {'linear'}
  plain = X @ params['linear']['kernel']
  np.testing.assert_allclose(
    jax.jit(lambda p: model.module(p, RNG, True)(X))(params), 6 * plain, 1e-6
  )


def test_axes_come_from_the_metadata():
  def build(rngs):
    init = nnx.initializers.lecun_normal()
    return nnx.Linear(
      3,
      2,
      rngs=rngs,
      kernel_init=nnx.with_partitioning(init, ('embed', None)),
    )

  # Names that no mesh knows must not stop the module from being built.
  model = functional(build)
  assert model.logical_axes == {'kernel': ('embed', None), 'bias': None}
  assert model.init(RNG)['kernel'].shape == (3, 2)


def test_running_statistics_are_refused():
  with pytest.raises(ValueError, match=r'mean is a BatchStat.*LayerNorm'):
    functional(lambda rngs: nnx.BatchNorm(3, rngs=rngs))


def test_a_random_constant_is_refused():
  class Features(nnx.Module):
    def __init__(self, rngs):
      self.table = jax.random.normal(rngs.params(), (3,))

  with pytest.raises(ValueError, match=r'^table .* is not an nnx\.Param'):
    functional(lambda rngs: Features(rngs))


class Mlp(linen.Module):
  @linen.compact
  def __call__(self, x, deterministic=False):
    init = linen.initializers.lecun_normal()
    x = linen.Dense(
      8, kernel_init=linen.with_partitioning(init, ('model', None))
    )(x)
    x = linen.Dropout(0.5)(x, deterministic=deterministic)
    return linen.Dense(3)(x)


def test_linen_module():
  def function(apply, batch, rng):
    del rng
    # Two calls share one set of parameters.
    return apply(batch, deterministic=True) + apply(batch, deterministic=True)

  model = linen_functional(Mlp(), function, X)
  params = model.init(RNG)
  assert model.logical_axes == {
    'Dense_0': {'kernel': ('model', None), 'bias': None},
    'Dense_1': {'kernel': None, 'bias': None},
  }
  assert jax.tree.map(jnp.shape, params['Dense_0']) == {
    'kernel': (3, 8),
    'bias': (8,),
  }
  expected = Mlp().apply({'params': params}, X, deterministic=True)
  np.testing.assert_allclose(
    model.call(params, X, RNG), 2 * jnp.asarray(expected), rtol=1e-6
  )


def test_linen_dropout_follows_the_key():
  model = linen_functional(Mlp(), lambda apply, batch, _: apply(batch), X)
  params = model.init(RNG)
  one, two = (model.call(params, X, jax.random.key(i)) for i in (1, 2))
  assert not np.array_equal(one, two)
  np.testing.assert_array_equal(one, model.call(params, X, jax.random.key(1)))


def test_linen_running_statistics_are_refused():
  module = linen.BatchNorm(use_running_average=False)
  with pytest.raises(ValueError, match=r'collections batch_stats\. .*GroupN'):
    linen_functional(module, lambda apply, batch, _: apply(batch), X)
