"""Meshes and shardings, on eight virtual devices."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.tasks import jax_task, language_model_task
from decoupled_diloco.training import mesh as meshes

OPTIONS = TransformerOptions(
  vocab_size=32, width=32, layers=1, heads=4, kv_heads=2, sequence_length=16
)


def make(data=1, fsdp=1, tensor=1):
  return meshes.make_mesh(meshes.MeshOptions(data, fsdp, tensor))


def specs(task, mesh, **kwargs):
  return jax.tree.map(lambda s: s.spec, meshes.shardings(task, mesh, **kwargs))


def plain_task(axes=None, **shapes):
  return jax_task(
    lambda rng: {name: jnp.zeros(shape) for name, shape in shapes.items()},
    lambda params, batch, rng: jnp.zeros(()),
    logical_axes=None if axes is None else lambda: axes,
  )


def test_mesh_has_automatic_axes_and_takes_the_first_devices():
  mesh = make(2, 1, 2)
  assert mesh.axis_names == ('data', 'fsdp', 'tensor')
  assert mesh.axis_types == (AxisType.Auto,) * 3
  assert set(mesh.devices.flat) == set(jax.devices()[:4])


def test_mesh_can_be_put_on_given_devices():
  devices = jax.devices()[6:]
  mesh = meshes.make_mesh(meshes.MeshOptions(fsdp=2), devices)
  assert set(mesh.devices.flat) == set(devices)


def test_too_few_devices():
  with pytest.raises(ValueError, match=r'needs 16 devices, but there are 8'):
    make(4, 2, 2)
  with pytest.raises(ValueError, match='tensor=0 must be at least 1'):
    meshes.MeshOptions(tensor=0)


def test_logical_axes_of_the_transformer():
  spec = specs(language_model_task(OPTIONS), make(1, 4, 2))
  block = spec['layers']['0']
  assert spec['embed']['embedding'] == PartitionSpec('tensor', 'fsdp')
  assert block['attention']['query']['kernel'] == PartitionSpec(
    'fsdp', 'tensor', None
  )
  assert block['mlp']['down']['kernel'] == PartitionSpec('tensor', 'fsdp')
  assert block['mlp_norm']['scale'] == PartitionSpec(None)


def test_logical_axes_of_experts():
  options = dataclasses.replace(OPTIONS, num_experts=4, scan_layers=True)
  task = language_model_task(options)
  mlp = specs(task, make(1, 2, 2))['layers']['mlp']
  # Experts are dealt out whole, and their rows or columns of `embed` sharded.
  assert mlp['experts']['up']['kernel'] == PartitionSpec(
    None, 'tensor', 'fsdp', None
  )
  assert mlp['experts']['down']['kernel'] == PartitionSpec(
    None, 'tensor', None, 'fsdp'
  )
  # All devices route alike.
  assert mlp['router']['kernel'] == PartitionSpec(None, 'fsdp', None)
  # By another rule: experts over `fsdp`, and each of them over `tensor`.
  rules = (('expert', 'fsdp'), *meshes.DEFAULT_RULES)
  mlp = specs(task, make(1, 2, 2), rules=rules)['layers']['mlp']
  assert mlp['experts']['up']['kernel'] == PartitionSpec(
    None, 'fsdp', None, 'tensor'
  )
  three = dataclasses.replace(options, num_experts=3)
  with pytest.raises(ValueError, match=r"'expert' of 3 .*\('expert', None\)"):
    meshes.shardings(language_model_task(three), make(1, 2, 2))


def test_parameters_without_axes_are_sharded_by_their_shape():
  task = plain_task(a=(3, 8, 4), b=(5,), c=(), d=(4, 12))
  assert specs(task, make(fsdp=4)) == {
    'a': PartitionSpec(None, 'fsdp'),  # 8 is the largest that 4 divides
    'b': PartitionSpec(),  # 4 does not divide 5
    'c': PartitionSpec(),
    'd': PartitionSpec(None, 'fsdp'),
  }
  assert set(specs(task, make(data=8)).values()) == {PartitionSpec()}


def test_foreign_names():
  # 'model' is known to nobody: as if unnamed. 'tensor' is a mesh axis.
  axes = {'a': ('model', None), 'b': (None, 'tensor')}
  task = plain_task(axes, a=(8, 2), b=(2, 8))
  assert specs(task, make(1, 2, 2)) == {
    'a': PartitionSpec('fsdp'),
    'b': PartitionSpec(None, 'tensor'),
  }
  rules = (('model', 'tensor'), *meshes.DEFAULT_RULES)
  spec = specs(task, make(1, 2, 2), rules=rules)
  assert spec['a'] == PartitionSpec('tensor', None)


def test_a_split_that_does_not_divide_is_refused():
  with pytest.raises(
    ValueError,
    match=r"key.kernel has shape .* 'kv_heads' of 2 .* 'tensor' = 4.*"
    r"\('kv_heads', None\)",
  ):
    meshes.shardings(language_model_task(OPTIONS), make(tensor=4))
  rules = (('kv_heads', None), *meshes.DEFAULT_RULES)
  spec = specs(language_model_task(OPTIONS), make(tensor=4), rules=rules)
  key = spec['layers']['0']['attention']['key']['kernel']
  assert key == PartitionSpec('fsdp', None, None)


def test_axes_must_name_every_dimension():
  task = plain_task({'a': ('embed',)}, a=(8, 2))
  with pytest.raises(ValueError, match='name every dimension once'):
    meshes.shardings(task, make())


def test_batches_are_divided_by_data_and_fsdp():
  mesh = make(2, 2, 2)
  spec = meshes.batch_sharding(mesh).spec
  assert spec == PartitionSpec(('data', 'fsdp'))
  stacked = meshes.batch_sharding(mesh, stacked=True).spec
  assert stacked == PartitionSpec(None, ('data', 'fsdp'))
  meshes.check_batch(8, mesh)
  with pytest.raises(ValueError, match='data x fsdp = 4; nearest: 4, 8'):
    meshes.check_batch(6, mesh)
