"""Tests of fragment plans: the same everywhere, and every element in one."""

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decoupled_diloco.ops.fragments import fragment

NUM_LAYERS = 12


def numbered(shapes, dtype=jnp.float32):
  """A tree of arrays in which every element has its own number."""
  leaves, structure = jax.tree.flatten(
    shapes, is_leaf=lambda node: isinstance(node, tuple)
  )
  arrays, start = [], 0
  for shape in leaves:
    size = int(np.prod(shape, dtype=int))
    arrays.append(jnp.arange(start, start + size).reshape(shape).astype(dtype))
    start += size
  return structure.unflatten(arrays)


def scanned():
  return numbered(
    {
      'embed': {'table': (50, 8)},
      'layers': {
        'attention': {'query': (NUM_LAYERS, 8, 8), 'out': (NUM_LAYERS, 8, 8)},
        'mlp': {'up': (NUM_LAYERS, 8, 32), 'down': (NUM_LAYERS, 32, 8)},
        'norm': (NUM_LAYERS, 8),
      },
      'norm': (8,),
      'head': (8, 50),
    }
  )


def unroll(params):
  layers = [
    jax.tree.map(lambda leaf, i=i: leaf[i], params['layers'])
    for i in range(NUM_LAYERS)
  ]
  return {**params, 'layers': layers}


def shapes_of(params):
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params
  )


def sharding(num_devices):
  mesh = jax.make_mesh(
    (num_devices,),
    ('x',),
    axis_types=(AxisType.Auto,),
    devices=jax.devices()[:num_devices],
  )
  return NamedSharding(mesh, PartitionSpec(None, 'x'))


def all_values(plan, params):
  return [plan.take(params, p) for p in range(plan.num_fragments)]


def assert_trees_equal(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize('pattern', ['balanced', 'strided', 'layers'])
def test_scanned_and_unrolled_models_have_the_same_fragments(pattern):
  params = scanned()
  plan = fragment(params, 9, pattern)
  flat_plan = fragment(unroll(params), 9, pattern)
  assert plan.digest == flat_plan.digest
  assert plan.sizes == flat_plan.sizes
  for p in range(9):
    assert plan.names(p) == flat_plan.names(p)
    assert plan.shapes(p) == flat_plan.shapes(p)
    assert_trees_equal(plan.take(params, p), flat_plan.take(unroll(params), p))
  # They lie in different places, so as static arguments they are not the same.
  assert plan != flat_plan
  assert hash(plan) == hash(flat_plan)


def test_digest_does_not_depend_on_values_shapes_or_sharding():
  params = scanned()
  digest = fragment(params, 9).digest
  assert len(digest) == 64
  assert fragment(shapes_of(params), 9).digest == digest
  assert fragment(jax.tree.map(np.asarray, params), 9).digest == digest
  params['layers']['mlp'] = jax.device_put(params['layers']['mlp'], sharding(2))
  assert fragment(params, 9).digest == digest
  assert fragment(params, 9) == fragment(shapes_of(params), 9)


def test_digest_depends_on_whatever_changes_the_meaning():
  params = shapes_of(scanned())
  wide = {**params, 'norm': jax.ShapeDtypeStruct((9,), jnp.float32)}
  low = {**params, 'norm': jax.ShapeDtypeStruct((8,), jnp.bfloat16)}
  plans = [
    fragment(params, 9),
    fragment(params, 8),
    fragment(params, 9, 'strided'),
    fragment(params, 9, embedding=None),
    fragment({**params, 'final': params['norm']}, 9),
    fragment({**params, 'final': params['norm']}, 9, tied=[('norm', 'final')]),
    fragment(wide, 9),
    fragment(low, 9),
  ]
  assert len({plan.digest for plan in plans}) == len(plans)


def test_the_digest_is_the_same_on_every_machine():
  # A change of this text means that old and new learners cannot meet.
  text = '["decoupled_diloco fragments 1",[[["a",[],[2,3],"float32",false]]]]'
  plan = fragment({'a': np.zeros((2, 3), np.float32)}, 1)
  assert plan.digest == hashlib.sha256(text.encode()).hexdigest()


def test_the_default_is_balanced_over_24_fragments():
  width, vocabulary, depth = 64, 1000, 24
  params = jax.eval_shape(
    lambda: {
      'embed': jnp.zeros((vocabulary, width)),
      'layers': {
        'attention': jnp.zeros((depth, 4, width, width)),
        'up': jnp.zeros((depth, width, 4 * width)),
        'down': jnp.zeros((depth, 4 * width, width)),
        'norm': jnp.zeros((depth, width)),
      },
    }
  )
  plan = fragment(params)
  assert plan.num_fragments == 24
  assert plan.num_elements == sum(leaf.size for leaf in jax.tree.leaves(params))
  # 72 equal pieces and the norms over 22 or 23 fragments: 4 in the fullest.
  assert max(plan.sizes) <= 4 / 3 * plan.num_elements / 24
  assert [plan.is_embedding(p) for p in (0, 23)] == [False, True]


@st.composite
def trees(draw):
  shape = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)
  depth = draw(st.integers(1, 4))
  some = st.dictionaries(st.sampled_from('abcd'), shape, max_size=4)
  stacked = {k: (depth, *s) for k, s in draw(some).items()}
  embeds = {f'embed_{k}': s for k, s in draw(some).items()}
  return {'layers': stacked, 'emb': embeds, **draw(some), 'z': draw(shape)}


@settings(max_examples=20, deadline=None)
@given(trees(), st.integers(1, 9), st.sampled_from(['balanced', 'strided']))
def test_every_element_is_in_exactly_one_fragment(shapes, count, pattern):
  params = jax.tree.map(np.asarray, numbered(shapes))
  try:
    plan = fragment(params, count, pattern)
  except ValueError as error:
    assert 'num_fragments' in str(error)
    return
  values = all_values(plan, params)
  seen = np.concatenate([np.ravel(v) for vs in values for v in vs])
  total = sum(leaf.size for leaf in jax.tree.leaves(params))
  np.testing.assert_array_equal(np.sort(seen), np.arange(total))
  assert plan.sizes == tuple(sum(np.size(v) for v in vs) for vs in values)
  assert plan == fragment(shapes_of(params), count, pattern)


def test_put_changes_one_fragment_and_nothing_else():
  params = scanned()
  plan = fragment(params, 7)  # Some fragments hold row blocks of `embed`.
  for p in range(7):
    changed = plan.put(params, p, [-v for v in plan.take(params, p)])
    for q in range(7):
      for before, after in zip(
        plan.take(params, q), plan.take(changed, q), strict=True
      ):
        np.testing.assert_array_equal(after, -before if p == q else before)


@pytest.mark.parametrize('num_fragments', [1, 7, 20])
def test_assemble_inverts_take(num_fragments):
  for params in (scanned(), unroll(scanned())):
    plan = fragment(params, num_fragments)
    values = all_values(plan, params)
    assert_trees_equal(plan.assemble(values, shapes_of(params)), params)


def test_row_blocks_of_a_stacked_embedding():
  params = numbered({'layers': {'embed': (2, 6, 3)}, 'w': (4,)})
  plan = fragment(params, 5)
  assert plan.names(1) == ('layers.0.embed[0:3]',)
  values = all_values(plan, params)
  np.testing.assert_array_equal(values[2][0], params['layers']['embed'][0, 3:])
  assert_trees_equal(plan.assemble(values, params), params)
  zeros = jax.tree.map(jnp.zeros_like, params)
  for p in range(5):
    zeros = plan.put(zeros, p, values[p])
  assert_trees_equal(zeros, params)


def test_plan_is_a_static_argument_and_put_writes_in_place():
  params = scanned()
  plan = fragment(params, 7)
  take = jax.jit(type(plan).take, static_argnums=(0, 2))
  put = jax.jit(type(plan).put, static_argnums=(0, 2), donate_argnames='params')
  values = take(plan, params, 2)
  assert_trees_equal(values, plan.take(params, 2))
  expected = jax.device_get(plan.put(params, 2, [-v for v in values]))
  addresses = jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), params)
  changed = put(plan, params, 2, tuple(-v for v in values))
  assert_trees_equal(changed, expected)
  assert addresses['layers'] == jax.tree.map(
    lambda leaf: leaf.unsafe_buffer_pointer(), changed['layers']
  )


def test_put_keeps_the_sharding():
  spread = sharding(4)
  params = {'layers': {'w': jax.device_put(jnp.ones((3, 8)), spread)}}
  plan = fragment(params, 3)
  put = jax.jit(functools.partial(plan.put, p=1), donate_argnums=0)
  changed = put(params, values=(jnp.zeros(8),))
  assert changed['layers']['w'].sharding.is_equivalent_to(spread, 2)
  np.testing.assert_array_equal(changed['layers']['w'].sum(axis=1), [8, 0, 8])


def test_values_are_cast_to_the_dtype_of_their_leaf():
  params = {'w': jnp.zeros(2, jnp.bfloat16)}
  changed = fragment(params, 1).put(params, 0, (jnp.ones(2),))
  assert changed['w'].dtype == jnp.bfloat16


def test_stacked_deltas_are_taken_learner_by_learner():
  params = scanned()
  plan = fragment(params, 7)
  deltas = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 2 * leaf]), params)
  for p in (0, 6):  # Layer slices, and row blocks.
    for value, stacked in zip(
      plan.take(params, p), plan.take_stacked(deltas, p), strict=True
    ):
      np.testing.assert_array_equal(stacked[1], -value)
      np.testing.assert_array_equal(stacked[2], 2 * value)


@pytest.mark.parametrize('named', [False, True])
def test_tied_leaves_are_one_piece_that_is_written_everywhere(named):
  table = jnp.ones((4, 2))
  params = {'embed': table, 'head': table, 'w': jnp.ones(3)}
  plan = (
    fragment(shapes_of(params), 2, tied=[('head', 'embed')])
    if named
    else fragment(params, 2)
  )
  assert plan.num_elements == 4 * 2 + 3
  assert plan.names(1) == ('embed',)
  changed = plan.put(params, 1, (jnp.zeros((4, 2)),))
  np.testing.assert_array_equal(changed['embed'], jnp.zeros((4, 2)))
  np.testing.assert_array_equal(changed['head'], jnp.zeros((4, 2)))
  assembled = plan.assemble(all_values(plan, changed), params)
  assert_trees_equal(assembled, changed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
  layers: dict
  bias: jax.Array


def test_any_pytree_will_do():
  params = [Block({'w': jnp.ones((2, 3))}, jnp.ones(5)), jnp.ones(1)]
  plan = fragment(params, 2)
  assert sorted(plan.names(0) + plan.names(1)) == [
    '0.bias',
    '0.layers.0.w',
    '0.layers.1.w',
    '1',
  ]
  changed = plan.put(params, 0, [0 * v for v in plan.take(params, 0)])
  assert isinstance(changed[0], Block)


def test_states_of_nnx_modules():
  model = nnx.Sequential(
    nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  )
  state = nnx.state(model, nnx.Param)
  params = nnx.to_pure_dict(state)
  plan = fragment(params, 2)
  # Kernels of 6 open the fragments, then biases of 3 and 2 follow in order.
  assert plan.names(0) == ('layers.0.bias', 'layers.0.kernel')
  changed = plan.put(params, 0, [0 * v for v in plan.take(params, 0)])
  assert jax.tree.structure(changed) == jax.tree.structure(params)
  # A state has the names of its pure dict, and stays a state.
  assert fragment(state, 2) == plan
  changed = plan.put(state, 0, [0 * v for v in plan.take(state, 0)])
  assert isinstance(changed, nnx.State)


def test_errors_give_rule_value_and_fix():
  params = scanned()
  plan = fragment(params, 7)
  with pytest.raises(ValueError, match='Fragment 7 must be one of 0 to 6'):
    plan.take(params, 7)
  with pytest.raises(ValueError, match='must have pieces of shapes'):
    plan.put(params, 0, plan.take(params, 0)[1:])
  with pytest.raises(ValueError, match='values of all 7 fragments, got 1'):
    plan.assemble([plan.take(params, 0)], params)
  p = next(p for p in range(7) if 'norm' in plan.names(p))
  with pytest.raises(ValueError, match=r"'norm' must have shape \(8,\)"):
    plan.take({**params, 'norm': jnp.zeros(9)}, p)
  with pytest.raises(ValueError, match='must have a leading learner axis'):
    plan.take_stacked(params, p)
  with pytest.raises(ValueError, match="'norm' is missing"):
    plan.take({'head': params['head'], 'layers': params['layers']}, p)
