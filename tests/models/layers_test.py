"""Attention, rotary positions and MLP."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from decoupled_diloco.models import layers

WIDTH, HEADS, HEAD_DIM = 16, 4, 8


def make_attention(kv_heads: int) -> layers.Attention:
  return layers.Attention(
    WIDTH,
    heads=HEADS,
    kv_heads=kv_heads,
    head_dim=HEAD_DIM,
    out_scale=1.0,
    dtype=jnp.dtype('float32'),
    rngs=nnx.Rngs(0),
  )


def test_rotation_turns_the_first_pair_by_one_radian_a_position():
  # Pair 0 of head_dim 4 is (x[0], x[2]) and has frequency base**0 = 1:
  # (1, 0) at position p becomes (cos p, sin p).
  x = jnp.zeros((1, 3, 1, 4)).at[..., 0].set(1.0)
  turned = layers.rotate(x, layers.rotation(3, 4, 100.0))
  position = np.arange(3.0)
  np.testing.assert_allclose(turned[0, :, 0, 0], np.cos(position), atol=1e-6)
  np.testing.assert_allclose(turned[0, :, 0, 2], np.sin(position), atol=1e-6)
  # Pair 1 has frequency 100 ** (-2/4) = 0.1.
  x = jnp.zeros((1, 3, 1, 4)).at[..., 1].set(1.0)
  turned = layers.rotate(x, layers.rotation(3, 4, 100.0))
  np.testing.assert_allclose(
    turned[0, :, 0, 1], np.cos(0.1 * position), atol=1e-6
  )


def test_rotated_products_depend_on_the_distance_only():
  length = 12
  query, key = jax.random.normal(jax.random.key(0), (2, HEAD_DIM))
  turn = layers.rotation(length, HEAD_DIM, 10_000.0)

  def everywhere(vector):
    return layers.rotate(
      jnp.broadcast_to(vector, (1, length, 1, HEAD_DIM)), turn
    )[0, :, 0]

  products = everywhere(query) @ everywhere(key).T
  for distance in (0, 1, 5):
    diagonal = jnp.diagonal(products, offset=distance)
    np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
  # ... and they do depend on it.
  assert not np.isclose(products[0, 0], products[0, 5])


def test_grouped_query_attention_is_attention_with_repeated_heads():
  grouped, full = make_attention(kv_heads=2), make_attention(kv_heads=HEADS)
  full.query.kernel[...] = grouped.query.kernel[...]
  full.out.kernel[...] = grouped.out.kernel[...]
  for name in ('key', 'value'):
    # Query heads 0 and 1 share key-value head 0; 2 and 3 share head 1.
    kernel = jnp.repeat(getattr(grouped, name).kernel[...], 2, axis=1)
    getattr(full, name).kernel[...] = kernel
  x = jax.random.normal(jax.random.key(1), (2, 6, WIDTH))
  turn = layers.rotation(6, HEAD_DIM, 10_000.0)
  np.testing.assert_allclose(
    grouped(x, turn), full(x, turn), rtol=1e-5, atol=1e-6
  )


def test_attention_may_look_ahead_when_it_is_not_causal():
  attention = make_attention(kv_heads=1)
  x = jax.random.normal(jax.random.key(1), (1, 4, WIDTH))
  changed = x.at[:, 3].add(1.0)
  for causal in (True, False):
    before, after = (attention(v, causal=causal)[:, 0] for v in (x, changed))
    assert np.allclose(before, after, atol=1e-6) == causal


@pytest.mark.parametrize(
  ('activation', 'function'), [('swiglu', jax.nn.silu), ('geglu', jax.nn.gelu)]
)
def test_gated_mlp(activation, function):
  mlp = layers.GatedMlp(
    WIDTH,
    32,
    activation=activation,
    out_scale=1.0,
    dtype=jnp.dtype('float32'),
    rngs=nnx.Rngs(0),
  )
  x = jax.random.normal(jax.random.key(1), (2, 3, WIDTH))
  update, extra = mlp(x)
  gate, up, down = (m.kernel[...] for m in (mlp.gate, mlp.up, mlp.down))
  expected = (function(x @ gate) * (x @ up)) @ down
  np.testing.assert_allclose(update, expected, rtol=1e-5, atol=1e-6)
  assert extra == (0.0, {})


def test_norm_keeps_the_dtype_and_has_unit_root_mean_square():
  norm = layers.RmsNorm(WIDTH, rngs=nnx.Rngs(0))
  x = 100.0 * jax.random.normal(jax.random.key(1), (2, WIDTH))
  np.testing.assert_allclose(jnp.mean(norm(x) ** 2, axis=-1), 1.0, rtol=1e-5)
  assert norm(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
