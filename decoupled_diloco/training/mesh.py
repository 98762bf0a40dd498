"""The mesh of a learner and the sharding of what lies on it.

Three axes: `data` copies the parameters, `fsdp` shards them (ZeRO-3,
Rajbhandari et al., arXiv 1910.02054) and both share the batch; `tensor`
splits heads, MLPs and vocabulary (Shoeybi et al., arXiv 1909.08053). The
partitioner of XLA inserts the collectives.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import optax
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from decoupled_diloco.ops.array_types import ShapeTree
from decoupled_diloco.tasks import Task

BATCH_AXES = ('data', 'fsdp')
AXES = (*BATCH_AXES, 'tensor')

# Logical axis -> mesh axes. The first rule that finds its mesh axes free
# wins, so that an activation's batch takes `fsdp` before its width does, and
# experts are dealt out whole rather than cut up.
DEFAULT_RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
  ('batch', BATCH_AXES),
  ('vocab', 'tensor'),
  ('heads', 'tensor'),
  ('kv_heads', 'tensor'),
  ('expert', 'tensor'),
  ('mlp', 'tensor'),
  ('embed', 'fsdp'),
  ('head_dim', None),
  ('layers', None),
  ('norm', None),
  ('sequence', None),
)
Rules = Sequence[tuple[str, Any]]


@dataclasses.dataclass(frozen=True)
class MeshOptions:
  """Devices along each axis of a learner's mesh.

  Attributes:
    data: copies of the parameters.
    fsdp: shards of each copy; the batch is divided by data x fsdp.
    tensor: parts into which heads, MLPs and vocabulary are split.
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1

  def __post_init__(self):
    for name in AXES:
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name}={getattr(self, name)} must be at least 1; use 1 for an '
          'axis that is not needed.'
        )

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(getattr(self, name) for name in AXES)

  @property
  def num_devices(self) -> int:
    return math.prod(self.shape)


def make_mesh(
  options: MeshOptions, devices: Sequence[Any] | None = None
) -> Mesh:
  """A mesh over the first of `devices`, by default of all there are.

  Raises:
    ValueError: if there are too few devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  if options.num_devices > len(devices):
    raise ValueError(
      f'data={options.data} x fsdp={options.fsdp} x tensor={options.tensor} '
      f'needs {options.num_devices} devices, but there are {len(devices)} '
      f'({devices[0].platform}); lower one of them so that the product is at '
      f'most {len(devices)}.'
    )
  return jax.make_mesh(
    options.shape,
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices[: options.num_devices],
  )


def shardings(task: Task, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
  """`NamedSharding`s of a task's parameters.

  A parameter's logical axes are translated by `rules`; a name without a rule
  stands for the mesh axis of that name, if there is one. A parameter of which
  no name is known is sharded over `fsdp` in its largest dimension that
  `fsdp` divides, and replicated if there is none.

  Raises:
    ValueError: if a rule asks for a split that does not divide a dimension.
  """
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  paths, treedef = jax.tree_util.tree_flatten_with_path(shapes)
  axes = treedef.flatten_up_to(task.logical_axes())
  rules = (*rules, *((name, name) for name in mesh.axis_names))
  return treedef.unflatten(
    NamedSharding(
      mesh,
      _partition(
        jax.tree_util.keystr(path, simple=True, separator='.'),
        shape.shape,
        names,
        mesh,
        rules,
      ),
    )
    for (path, shape), names in zip(paths, axes, strict=True)
  )


def opt_state_shardings(
  tx: optax.GradientTransformation, params: ShapeTree, params_shardings: Any
) -> Any:
  """`NamedSharding`s of an optimizer state: moments lie like their parameters.

  Counters, and what an optimizer has reduced to another shape (Adafactor),
  are replicated.
  """
  mesh = jax.tree.leaves(params_shardings)[0].mesh
  with jax.numpy_dtype_promotion('standard'):
    opt_state = jax.eval_shape(tx.init, params)
  return optax.tree.map_params(
    tx,
    lambda leaf, param, sharding: (
      sharding if leaf.shape == param.shape else replicated(mesh)
    ),
    opt_state,
    params,
    params_shardings,
    transform_non_params=lambda _: replicated(mesh),
  )


def batch_sharding(mesh: Mesh, *, stacked: bool = False) -> NamedSharding:
  """Of [batch, ...] arrays, or of `stacked` ones, [step, batch, ...]."""
  leading = (None,) if stacked else ()
  return NamedSharding(mesh, PartitionSpec(*leading, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def check_batch(batch_size: int, mesh: Mesh) -> None:
  """Raises ValueError if the mesh cannot divide a batch of that size."""
  parts = math.prod(mesh.shape[name] for name in BATCH_AXES)
  if batch_size % parts:
    below = batch_size // parts * parts
    nearest = [size for size in (below, below + parts) if size]
    raise ValueError(
      f'A batch of {batch_size} must be a multiple of data x fsdp = {parts}; '
      f'nearest: {", ".join(map(str, nearest))}.'
    )


def _partition(
  name: str, shape: tuple[int, ...], axes: Any, mesh: Mesh, rules: Rules
) -> PartitionSpec:
  known = {logical for logical, _ in rules}
  if axes is None or not known.intersection(filter(_is_name, axes)):
    return _by_shape(shape, mesh.shape['fsdp'])
  if len(axes) != len(shape):
    raise ValueError(
      f'{name} has shape {shape} but the logical axes {tuple(axes)}; name '
      'every dimension once (None for an unnamed one).'
    )
  spec = logical_to_mesh_axes(tuple(axes), tuple(rules))
  assert spec is not None
  for size, logical, mesh_axes in zip(shape, axes, spec, strict=True):
    parts = math.prod(
      mesh.shape[axis]
      for axis in (mesh_axes if isinstance(mesh_axes, tuple) else (mesh_axes,))
      if axis is not None
    )
    if size % parts:
      raise ValueError(
        f'{name} has shape {shape}; its axis {logical!r} of {size} must be a '
        f'multiple of the mesh axis {mesh_axes!r} = {parts}. Lower '
        f'{mesh_axes!r} to a divisor of {size}, or replace the sharding rule '
        f'by ({logical!r}, None).'
      )
  return spec


def _is_name(axis: Any) -> bool:
  return isinstance(axis, str)


def _by_shape(shape: tuple[int, ...], fsdp: int) -> PartitionSpec:
  dimensions = [d for d, size in enumerate(shape) if size and size % fsdp == 0]
  if fsdp == 1 or not dimensions:
    return PartitionSpec()
  largest = max(dimensions, key=lambda d: shape[d])
  return PartitionSpec(*(None,) * largest, 'fsdp')
