"""The vision transformer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled_diloco.models import vit
from decoupled_diloco.models.functional import functional
from decoupled_diloco.tasks import image_task

RNG = jax.random.key(0)
OPTIONS = vit.VitOptions(
  image_size=6, patch_size=2, channels=3, num_classes=5, width=16, heads=2
)
BATCH = {
  'image': jax.random.normal(jax.random.key(1), (4, 6, 6, 3)),
  'label': jnp.array([0, 4, 2, 2], jnp.int32),
}


def varied(**changes) -> vit.VitOptions:
  return dataclasses.replace(OPTIONS, **changes)


def with_random_head(params):
  """The head is zero at first, and then nothing below it has a gradient."""
  kernel = jax.random.normal(jax.random.key(2), params['head']['kernel'].shape)
  return {**params, 'head': {**params['head'], 'kernel': kernel}}


@pytest.fixture(scope='module')
def params():
  return with_random_head(jax.jit(image_task(OPTIONS).init)(RNG))


def logits_of(options, params, images):
  model = functional(lambda rngs: vit.Vit(options, rngs=rngs))
  return jax.jit(lambda p, x: model.module(p, RNG, False)(x))(params, images)


def test_patches_are_squares_row_by_row():
  # Pixel (y, x) of a 4 x 6 image has the value 10 y + x.
  image = 10.0 * jnp.arange(4.0)[:, None] + jnp.arange(6.0)[None]
  patches = vit.cut_patches(image[None, :, :, None], 2)
  assert patches.shape == (1, 6, 4)
  np.testing.assert_array_equal(patches[0, 0], [0, 1, 10, 11])
  np.testing.assert_array_equal(patches[0, 1], [2, 3, 12, 13])
  np.testing.assert_array_equal(patches[0, 3], [20, 21, 30, 31])
  # Channels come last within a patch.
  both = vit.cut_patches(jnp.stack([image, -image], axis=-1)[None], 2)
  np.testing.assert_array_equal(both[0, 0], [0, -0, 1, -1, 10, -10, 11, -11])


def test_sincos_positions_by_hand():
  # A width of 8 has the frequencies 1 and 1 / 10,000. Patch 5 of 3 x 3 is in
  # row 1 and column 2.
  positions = vit.sincos_positions(3, 8)
  assert positions.shape == (9, 8)
  column, row = (
    [np.sin(at), np.sin(at * 1e-4), np.cos(at), np.cos(at * 1e-4)]
    for at in (2.0, 1.0)
  )
  np.testing.assert_allclose(positions[5], [*column, *row], rtol=1e-5)
  assert len(np.unique(np.round(positions, 4), axis=0)) == 9
  assert np.all(np.isfinite(vit.sincos_positions(3, 4)))


@pytest.mark.parametrize('positions', ['learned', 'sincos'])
def test_positions_matter_and_come_as_the_options_say(params, positions):
  options = varied(positions=positions)
  if positions == 'learned':
    assert params['positions'].shape == (9, 16)
    # At first they are small, so that patches speak louder.
    params = {**params, 'positions': 50 * params['positions']}
  else:
    params = {k: v for k, v in params.items() if k != 'positions'}
    shapes = jax.eval_shape(image_task(options).init, RNG)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
  image = BATCH['image']
  turned = image[:, ::-1]  # other patches in other places
  shifted = jnp.roll(image, 2, axis=1)  # the same patches in other places
  logits = logits_of(options, params, image)
  assert logits.shape == (4, 5)
  assert logits.dtype == jnp.float32
  for other in (turned, shifted):
    assert not np.allclose(logits_of(options, params, other), logits, atol=1e-2)


def test_without_positions_the_order_of_patches_is_nothing(params):
  # So attention looks both ways, and the mean is over all patches.
  params = {**params, 'positions': jnp.zeros((9, 16))}
  image = BATCH['image']
  np.testing.assert_allclose(
    logits_of(OPTIONS, params, jnp.roll(image, 2, axis=1)),
    logits_of(OPTIONS, params, image),
    rtol=1e-4,
    atol=1e-5,
  )


def test_first_loss_is_that_of_guessing():
  task = image_task(OPTIONS)
  loss, _ = jax.jit(task.loss)(jax.jit(task.init)(RNG), BATCH, RNG)
  np.testing.assert_allclose(loss, np.log(5), rtol=1e-6)


def stacked(params):
  blocks = [params['layers'][str(i)] for i in range(OPTIONS.layers)]
  layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
  return {**params, 'layers': layers}


def losses_and_gradients(options, params):
  task = image_task(options)
  return jax.jit(jax.value_and_grad(lambda p: task.loss(p, BATCH, RNG)[0]))(
    params
  )


def test_scanned_rematerialised_layers_are_the_same_model(params):
  loss, gradient = losses_and_gradients(OPTIONS, params)
  scan_loss, scan_gradient = losses_and_gradients(
    varied(scan_layers=True, remat='full'), stacked(params)
  )
  np.testing.assert_allclose(scan_loss, loss, rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
    scan_gradient,
    stacked(gradient),
  )
  assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_bfloat16_is_close(params):
  exact = logits_of(OPTIONS, params, BATCH['image'])
  logits = logits_of(varied(dtype='bfloat16'), params, BATCH['image'])
  assert logits.dtype == jnp.float32
  # Two layers and a head, each rounded to 8 bits.
  np.testing.assert_allclose(logits, exact, atol=0.05 * np.abs(exact).max())


def test_experts_can_be_used():
  task = image_task(varied(num_experts=4, mlp_width=8))
  params = jax.jit(task.init)(RNG)
  loss, metrics = jax.jit(task.loss)(params, BATCH, RNG)
  assert loss > metrics['cross_entropy']
  assert 0.0 <= metrics['dropped'] < 1.0


def test_default_size():
  # What the digits need: 8 x 8 pixels, 16 patches, 10 classes. Patches:
  # (4 + 1) * 64; positions 16 * 64; two layers of 4 * 64^2 + 3 * 64 * 192 + 2 *
  # 64; final norm 64; head (64 + 1) * 10.
  shapes = jax.eval_shape(image_task(vit.VitOptions()).init, RNG)
  expected = 320 + 1024 + 2 * (16_384 + 36_864 + 128) + 64 + 650
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == expected


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'patch_size': 4}, r'multiple of patch_size=4; possible: 1, 2, 3, 6\.'),
    ({'image_size': 0}, 'image_size=0 must be at least 1'),
    ({'num_classes': 0}, 'num_classes=0 must be at least 1'),
    ({'positions': 'none'}, "'learned', 'sincos'"),
    ({'positions': 'sincos', 'width': 18}, r"nearest: 20; or use 'learned'"),
    ({'heads': 3}, 'multiple of heads=3'),
  ],
)
def test_options_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    varied(**changes)


def test_heads_of_odd_width_are_allowed():
  # There are no rotary positions, which turn pairs.
  assert varied(head_dim=5).size_of_head == 5
