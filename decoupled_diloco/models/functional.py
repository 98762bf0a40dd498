"""Flax modules as pure functions of parameters in plain nested dicts.

What is trained, sent and stored is a pytree of nested dicts with string keys
and array leaves, whichever Flax API the model is written in. The module
itself is taken apart once, outside every jit and scan.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from flax import linen, nnx

from decoupled_diloco.ops.array_types import Params

Axes = tuple[Any, ...] | None


class Functional(NamedTuple):
  """An nnx module, taken apart.

  Attributes:
    init: `init(rng) -> params`.
    module: `module(params, rng, train) -> nnx.Module`, with the random
      streams (dropout) seeded from `rng`; not `train`: in evaluation mode.
    logical_axes: like params; a tuple with one entry a dimension, or None
      for a parameter without sharding metadata.
  """

  init: Callable[[jax.Array], Params]
  module: Callable[[Params, jax.Array, bool], Any]
  logical_axes: dict[str, Any]


class LinenFunctional(NamedTuple):
  """A linen module and the function that calls it, as pure functions.

  Attributes:
    init: `init(rng) -> params`.
    call: `call(params, batch, rng)`: the user's function's result.
    logical_axes: like params, see `Functional`.
  """

  init: Callable[[jax.Array], Params]
  call: Callable[[Params, Any, jax.Array], Any]
  logical_axes: dict[str, Any]


def functional(build: Callable[[nnx.Rngs], Any]) -> Functional:
  """Takes the nnx module that `build(rngs)` makes apart.

  A module used in several places (tied weights) has its parameters once.

  Raises:
    ValueError: if the module has state that is neither a parameter nor a
      random stream nor a constant array.
  """
  found: dict[str, Any] = {}

  def inspect(key: jax.Array) -> None:
    # Constants (an array as an attribute) do not depend on the key, and get
    # their values here; all that does depend on it stays abstract.
    with jax.ensure_compile_time_eval(), nnx.use_eager_sharding(False):
      module = build(nnx.Rngs(key))
      _check_constants(module)
      train, params, streams, rest = nnx.split(
        module, nnx.Param, nnx.RngState, ...
      )
      module.eval()
      evaluate = nnx.graphdef(module)
    found['graphdef'] = {True: train, False: evaluate}
    found['params'] = {
      path: _axes(leaf) for path, leaf in nnx.to_flat_state(params)
    }
    found['streams'] = {
      path: (type(leaf), leaf.get_value().shape)
      for path, leaf in nnx.to_flat_state(streams)
    }
    found['rest'] = dict(nnx.to_flat_state(rest))

  jax.eval_shape(inspect, jax.random.key(0))
  _check_state(found['rest'])
  axes: dict[tuple, Axes] = found['params']
  streams: dict[tuple, tuple[type, tuple[int, ...]]] = found['streams']

  def init(rng: jax.Array) -> Params:
    with nnx.use_eager_sharding(False):
      _, params, _ = nnx.split(build(nnx.Rngs(rng)), nnx.Param, ...)
    return _nested(
      {path: leaf.get_value() for path, leaf in nnx.to_flat_state(params)}
    )

  def module(params: Params, rng: jax.Array, train: bool) -> Any:
    leaves = {path: _look_up(params, path) for path in axes}
    for number, (path, (kind, shape)) in enumerate(streams.items()):
      if issubclass(kind, nnx.RngKey):
        key = jax.random.fold_in(rng, number)
        leaves[path] = jax.random.split(key, shape) if shape else key
      else:
        leaves[path] = jnp.zeros(shape, jnp.uint32)
    leaves.update(found['rest'])
    return nnx.merge(found['graphdef'][train], nnx.from_flat_state(leaves))

  return Functional(init, module, _nested(axes))


def linen_functional(
  module: linen.Module, function: Callable[..., Any], example_batch: Any
) -> LinenFunctional:
  """Takes a linen module apart.

  Args:
    module: the module.
    function: `function(apply, batch, rng)`, which calls `apply(*args,
      **kwargs)` as it would call a bound module. All of the module's random
      streams are derived from `rng`.
    example_batch: arrays, or `jax.ShapeDtypeStruct`s, shaped like a batch.

  Raises:
    ValueError: if the module has variables other than parameters.
  """
  example = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), example_batch
  )

  def boxed(rng: jax.Array) -> dict[str, Any]:
    variables: dict[str, Any] = {}

    def apply(*args, **kwargs):
      # The first call creates the parameters.
      if variables:
        return module.apply(_unboxed(variables), *args, rngs=rng, **kwargs)
      output, created = module.init_with_output(rng, *args, **kwargs)
      others = sorted(set(created) - {'params'})
      if others:
        raise ValueError(
          f'{type(module).__name__} has variables that are not parameters, in '
          f'the collections {", ".join(others)}. {_STATE_FIX}'
        )
      variables.update(created)
      return output

    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), example)
    function(apply, batch, rng)
    return variables.get('params', {})

  def init(rng: jax.Array) -> Params:
    return _unboxed(boxed(rng))

  def call(params: Params, batch: Any, rng: jax.Array) -> Any:
    def apply(*args, **kwargs):
      return module.apply({'params': params}, *args, rngs=rng, **kwargs)

    return function(apply, batch, rng)

  shapes = jax.eval_shape(boxed, jax.random.key(0))
  axes = jax.tree.map(
    lambda leaf: tuple(leaf.names) if _is_partitioned(leaf) else None,
    shapes,
    is_leaf=_is_partitioned,
  )
  return LinenFunctional(init, call, axes)


_STATE_FIX = (
  'Only parameters are trained and exchanged; running statistics of different '
  'learners cannot be merged. Use a layer without them (LayerNorm, RMSNorm or '
  'GroupNorm instead of BatchNorm), or make it a parameter.'
)


def _check_state(rest: dict[tuple, Any]) -> None:
  for path, leaf in rest.items():
    if isinstance(leaf, nnx.Variable):
      raise ValueError(
        f'{_name(path)} is a {type(leaf).__name__}, which is neither an '
        f'nnx.Param nor a random stream. {_STATE_FIX} A constant can be a '
        'numpy array.'
      )


def _check_constants(module: Any) -> None:
  for path, node in nnx.iter_graph(module):
    if not isinstance(node, nnx.Pytree):
      continue
    for name, value in vars(node).items():
      if isinstance(value, jax.core.Tracer):
        raise ValueError(
          f'{_name((*path, name))} is an array that depends on the random '
          'key but is not an nnx.Param; make it an nnx.Param to train it, or '
          'compute it with numpy from a fixed seed.'
        )


def _axes(leaf: nnx.Variable) -> Axes:
  names = leaf.get_metadata('out_sharding', None)
  if isinstance(names, jax.sharding.NamedSharding):
    names = names.spec
  return None if names is None else tuple(names)


def _is_partitioned(leaf: Any) -> bool:
  return isinstance(leaf, linen.Partitioned)


def _unboxed(tree: Any) -> Any:
  return jax.tree.map(
    lambda leaf: leaf.value if _is_partitioned(leaf) else leaf,
    tree,
    is_leaf=_is_partitioned,
  )


def _nested(flat: dict[tuple, Any]) -> dict[str, Any]:
  """Nested dicts with string keys: list indices would not survive a disk."""
  nested: dict[str, Any] = {}
  for path, leaf in flat.items():
    node = nested
    for part in path[:-1]:
      node = node.setdefault(str(part), {})
    node[str(path[-1])] = leaf
  return nested


def _look_up(nested: Params, path: tuple) -> Any:
  node: Any = nested
  for part in path:
    node = node[str(part)]
  return node


def _name(path: tuple) -> str:
  return '.'.join(map(str, path))
