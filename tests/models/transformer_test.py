"""The language model as a whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled_diloco.models import transformer
from decoupled_diloco.models.functional import functional
from decoupled_diloco.tasks import language_model_task

OPTIONS = transformer.TransformerOptions(
  vocab_size=32, width=32, layers=2, heads=4, kv_heads=2, sequence_length=16
)
RNG = jax.random.key(0)
BATCH = {'tokens': jax.random.randint(jax.random.key(1), (2, 17), 0, 32)}


def varied(**changes) -> transformer.TransformerOptions:
  return dataclasses.replace(OPTIONS, **changes)


def losses_and_gradients(options, params):
  task = language_model_task(options)
  return jax.jit(jax.value_and_grad(lambda p: task.loss(p, BATCH, RNG)[0]))(
    params
  )


def stacked(params):
  """The unrolled parameters in the form of the scanned ones."""
  blocks = [params['layers'][str(i)] for i in range(OPTIONS.layers)]
  layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
  return {**params, 'layers': layers}


@pytest.fixture(scope='module')
def params():
  return jax.jit(language_model_task(OPTIONS).init)(RNG)


def test_scanned_and_unrolled_layers_are_the_same_model(params):
  loss, gradient = losses_and_gradients(OPTIONS, params)
  scanned = varied(scan_layers=True)
  scan_loss, scan_gradient = losses_and_gradients(scanned, stacked(params))
  np.testing.assert_allclose(scan_loss, loss, rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    scan_gradient,
    stacked(gradient),
  )


def test_scanned_and_unrolled_layers_start_from_the_same_values(params):
  scanned = jax.jit(language_model_task(varied(scan_layers=True)).init)(RNG)
  jax.tree.map(np.testing.assert_array_equal, scanned, stacked(params))


def test_stacked_parameters_have_a_leading_layer_axis():
  axes = language_model_task(varied(scan_layers=True)).logical_axes()
  plain = language_model_task(OPTIONS).logical_axes()
  assert axes['layers']['mlp']['up']['kernel'] == ('layers', 'embed', 'mlp')
  assert plain['layers']['0']['mlp']['up']['kernel'] == ('embed', 'mlp')
  assert axes['embed']['embedding'] == ('vocab', 'embed')


@pytest.mark.parametrize(
  ('remat', 'scan_layers'), [('full', False), ('dots', True)]
)
def test_remat_changes_nothing(params, remat, scan_layers):
  params = stacked(params) if scan_layers else params
  expected = losses_and_gradients(varied(scan_layers=scan_layers), params)
  options = varied(scan_layers=scan_layers, remat=remat)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
    losses_and_gradients(options, params),
    expected,
  )


def test_future_tokens_do_not_change_past_logits(params):
  model = functional(lambda rngs: transformer.Transformer(OPTIONS, rngs=rngs))
  tokens = BATCH['tokens'][:, :16]
  changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % 32)
  run = jax.jit(lambda params, x: model.module(params, RNG, False)(x))
  before, after = run(params, tokens), run(params, changed)
  np.testing.assert_allclose(before[:, :9], after[:, :9], rtol=1e-6, atol=1e-6)
  assert not np.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


def test_untied_embeddings_add_a_table(params):
  untied = jax.eval_shape(
    language_model_task(varied(tied_embeddings=False)).init, RNG
  )
  assert untied['unembed']['embedding'].shape == (32, 32)
  assert 'unembed' not in params


def test_bfloat16_is_close_and_keeps_float32_parameters(params):
  task = language_model_task(varied(dtype='bfloat16'))
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  loss, _ = jax.jit(task.loss)(params, BATCH, RNG)
  exact, _ = jax.jit(language_model_task(OPTIONS).loss)(params, BATCH, RNG)
  assert loss.dtype == jnp.float32
  # Bfloat16 has 8 bits: a relative error of 2**-8 = 0.004 in each logit.
  np.testing.assert_allclose(loss, exact, rtol=1e-2)


def test_first_loss_is_near_that_of_guessing(params):
  loss, metrics = jax.jit(language_model_task(OPTIONS).loss)(params, BATCH, RNG)
  # Logits of variance 1 add half of it to log(32) = 3.47.
  assert 3.2 < loss < 4.5
  assert metrics['tokens'] == 32


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'kv_heads': 3}, 'multiple of kv_heads=3; possible: 1, 2, 4'),
    ({'width': 30, 'kv_heads': None}, 'multiple of heads=4 .* 28, 32'),
    ({'head_dim': 7}, 'head_dim=8'),
    ({'layers': 0}, 'layers=0 must be at least 1'),
    ({'mlp_width': -1}, 'mlp_width=-1'),
    ({'mlp': 'relu'}, "'swiglu', 'geglu'"),
    ({'dtype': 'float16'}, "'float32', 'bfloat16'"),
    ({'remat': 'some'}, "'none', 'full', 'dots'"),
    ({'rope_base': 1.0}, 'rope_base'),
  ],
)
def test_options_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    varied(**changes)


def test_default_mlp_width():
  # 8/3 * 32 = 85.3, in multiples of 64: 128. 8/3 * 768 = 2048 exactly.
  assert OPTIONS.size_of_mlp == 128
  assert varied(width=768).size_of_mlp == 2048
