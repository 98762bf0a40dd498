"""A stack of blocks, with experts; the dense one is in `transformer_test`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decoupled_diloco as ddl
from decoupled_diloco.models import transformer
from decoupled_diloco.models.functional import functional
from decoupled_diloco.ops.pieces import named_leaves
from decoupled_diloco.tasks import language_model_task

RNG = jax.random.key(0)
OPTIONS = transformer.TransformerOptions(
  vocab_size=32,
  width=32,
  layers=2,
  heads=4,
  kv_heads=2,
  mlp_width=16,
  sequence_length=16,
  num_experts=4,
)
BATCH = {'tokens': jax.random.randint(jax.random.key(1), (2, 17), 0, 32)}


def varied(**changes) -> transformer.TransformerOptions:
  return dataclasses.replace(OPTIONS, **changes)


def losses_and_gradients(options, params):
  """Loss, metrics and gradient, traced under strict promotion of dtypes."""
  task = language_model_task(options)
  traced = jax.jit(jax.value_and_grad(task.loss, has_aux=True)).trace(
    params, BATCH, RNG
  )
  # JAX's own attention, in bfloat16, cannot be lowered under strict promotion.
  with jax.numpy_dtype_promotion('standard'):
    compiled = traced.lower().compile()
  return compiled(params, BATCH, RNG)


def stacked(params):
  """The unrolled parameters in the form of the scanned ones."""
  blocks = [params['layers'][str(i)] for i in range(OPTIONS.layers)]
  layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
  return {**params, 'layers': layers}


@pytest.fixture(scope='module')
def params():
  return jax.jit(language_model_task(OPTIONS).init)(RNG)


@pytest.fixture(scope='module')
def unrolled(params):
  return losses_and_gradients(OPTIONS, params)


@pytest.mark.parametrize('remat', ['full', 'dots'])
def test_scanned_and_rematerialised_layers_are_the_same_model(
  params, unrolled, remat
):
  (loss, metrics), gradient = unrolled
  (scan_loss, scan_metrics), scan_gradient = losses_and_gradients(
    varied(scan_layers=True, remat=remat), stacked(params)
  )
  np.testing.assert_allclose(scan_loss, loss, rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    (scan_metrics, scan_gradient),
    (metrics, stacked(gradient)),
  )


def test_both_forms_start_from_the_same_values_and_name_their_axes(params):
  task = language_model_task(varied(scan_layers=True))
  jax.tree.map(
    np.testing.assert_array_equal, jax.jit(task.init)(RNG), stacked(params)
  )
  experts = params['layers']['0']['mlp']['experts']
  assert experts['gate']['kernel'].shape == (4, 32, 16)
  # Each expert is scaled by its own inputs (1 / sqrt(32), cut at two standard
  # deviations), and no two are equal.
  deviations = jnp.std(experts['gate']['kernel'], axis=(1, 2))
  np.testing.assert_allclose(deviations, 32**-0.5, rtol=0.15)
  assert len(np.unique(deviations)) == 4
  axes = task.logical_axes()['layers']['mlp']
  assert axes['experts']['down']['kernel'] == (
    'layers',
    'expert',
    'mlp',
    'embed',
  )
  assert axes['router']['kernel'] == ('layers', 'embed', None)


def test_bfloat16_is_close(params, unrolled):
  (loss, metrics), gradient = losses_and_gradients(
    varied(dtype='bfloat16'), params
  )
  (exact, _), exact_gradient = unrolled
  assert loss.dtype == metrics['load_balance'].dtype == jnp.float32
  # As for the dense model; a choice may also flip, where two logits are close.
  np.testing.assert_allclose(loss, exact, rtol=2e-2)
  assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {
    jnp.dtype('float32')
  }
  np.testing.assert_allclose(
    optax.tree.norm(gradient), optax.tree.norm(exact_gradient), rtol=0.1
  )


def test_every_expert_and_the_router_are_trained(unrolled):
  _, gradient = unrolled
  for layer in gradient['layers'].values():
    for leaf in jax.tree.leaves(layer['mlp']['experts']):
      assert np.all(jnp.max(jnp.abs(leaf), axis=(1, 2)) > 0.0)
    assert np.all(jnp.max(jnp.abs(layer['mlp']['router']['kernel']), axis=0))


def test_future_tokens_do_not_change_past_logits(params):
  # So few slots that many choices are dropped, in the order of the tokens.
  options = varied(capacity_factor=0.5)
  model = functional(lambda rngs: transformer.Transformer(options, rngs=rngs))
  tokens = BATCH['tokens'][:, :16]
  changed = tokens.at[:, 9:].set((tokens[:, 9:] + 7) % 32)
  run = jax.jit(lambda x: model.module(params, RNG, False).logits_and_extra(x))
  (before, extra), (after, _) = run(tokens), run(changed)
  assert extra.metrics['dropped'] > 0.3
  np.testing.assert_allclose(before[:, :9], after[:, :9], rtol=1e-6, atol=1e-6)
  assert not np.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


def test_a_sequence_does_not_depend_on_its_neighbours(params):
  options = varied(capacity_factor=0.5)
  model = functional(lambda rngs: transformer.Transformer(options, rngs=rngs))
  run = jax.jit(lambda x: model.module(params, RNG, False)(x))
  tokens = BATCH['tokens'][:, :16]
  changed = tokens.at[1].set(0)
  np.testing.assert_allclose(
    run(tokens)[0], run(changed)[0], rtol=1e-6, atol=1e-6
  )


def make_deltas(params, count: int):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.normal(size=(count, *leaf.shape)).astype(np.float32),
    params,
  )


def test_fragments_take_the_experts_of_a_layer_as_one_piece(params):
  plan = ddl.fragment(params, num_fragments=4)
  scanned = stacked(params)
  # One model, one plan: a layer's slice of the stack is the unrolled leaf.
  assert ddl.fragment(scanned, num_fragments=4).digest == plan.digest
  assert plan.num_elements == sum(x.size for x in jax.tree.leaves(params))
  pieces = {q.name: q for p in range(4) for q in plan.pieces(p)}
  gate = pieces['layers.1.mlp.experts.gate.kernel']
  assert (gate.shape, gate.is_embedding) == ((4, 32, 16), False)
  assert pieces['layers.1.mlp.router.kernel'].shape == (32, 4)
  for p in range(4):
    values = plan.take(params, p)
    doubled = plan.put(params, p, [2 * value for value in values])
    leaves, new = named_leaves(params), named_leaves(doubled)
    for name, leaf in leaves.items():
      factor = 2 if name in plan.names(p) else 1
      # The embedding is cut into rows, so its name is that of none.
      if not name.startswith('embed'):
        np.testing.assert_array_equal(new[name], factor * leaf)


@pytest.mark.parametrize('scan_layers', [False, True])
def test_an_outer_update_of_the_experts(params, scan_layers):
  params = stacked(params) if scan_layers else params
  plan = ddl.fragment(params, num_fragments=4)
  [p] = [
    p for p in range(4) if 'layers.1.mlp.experts.down.kernel' in plan.names(p)
  ]
  index = plan.names(p).index('layers.1.mlp.experts.down.kernel')
  outer = ddl.outer_transform(
    ddl.outer_optimizer(learning_rate=0.5, momentum=0.0), 'rda', plan
  )
  deltas = make_deltas(params, 3)
  weights = jnp.array([1.0, 3.0, 0.0])

  @functools.partial(jax.jit, static_argnames='fragment')
  def update(params, deltas, fragment):
    updates, _ = outer.update(
      deltas, outer.init(params), params, weights=weights, fragment=fragment
    )
    return optax.apply_updates(params, updates)

  new = update(params, deltas, fragment=p)
  before, after = (plan.take(tree, p)[index] for tree in (params, new))
  first, second, _ = np.array(plan.take_stacked(deltas, p)[index])
  # By hand, for the experts of the layer as one tensor: lengths and directions
  # are averaged apart with shares 1/4 and 3/4.
  lengths = [np.linalg.norm(delta) for delta in (first, second)]
  direction = first / lengths[0] / 4 + 3 * second / lengths[1] / 4
  length = lengths[0] / 4 + 3 * lengths[1] / 4
  merged = length * direction / np.linalg.norm(direction)
  np.testing.assert_allclose(after, before - 0.5 * merged, rtol=1e-4, atol=1e-5)
  for other in set(range(4)) - {p}:
    jax.tree.map(
      np.testing.assert_array_equal,
      plan.take(new, other),
      plan.take(params, other),
    )


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_experts': -1}, 'num_experts=-1 must not be negative; use 0'),
    ({'experts_per_token': 5}, 'at most num_experts=4; 2 is usual'),
    ({'experts_per_token': 0}, 'experts_per_token=0 must be at least 1'),
    ({'capacity_factor': 0.0}, 'capacity_factor=0.0 must be above 0'),
    ({'group_tokens': 0}, 'group_tokens=0'),
    ({'load_balance_weight': -1.0}, 'load_balance_weight=-1.0 must not be'),
    ({'router_z_weight': float('nan')}, 'router_z_weight=nan must not be'),
  ],
)
def test_options_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    varied(**changes)


def test_options_of_experts_are_free_without_experts():
  assert varied(num_experts=0, experts_per_token=0).num_experts == 0
