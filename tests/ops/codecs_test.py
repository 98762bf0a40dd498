"""One contract for all codecs, and what error feedback adds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled_diloco.ops.codecs import codec

BITS = {'f32': 32, 'bf16': 16, 'int8': 8, 'int4': 4, 'e3m0': 4, 'int2': 2}
SCALED = ('int8', 'int4', 'e3m0', 'int2')
SHAPES = [(), (1,), (0, 3), (256,), (3, 5), (2, 3, 129)]

every_codec = pytest.mark.parametrize('name', BITS)
every_scaled_codec = pytest.mark.parametrize('name', SCALED)


def normal(shape, dtype=jnp.float32, seed=0):
  values = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(values, dtype)


@functools.cache
def jitted(name, **options):
  """A codec whose functions are compiled, once per shape for all tests."""
  made = codec(name, **options)
  return made._replace(encode=jax.jit(made.encode), decode=jax.jit(made.decode))


def encode(name, x):
  made = jitted(name)
  return made, made.encode(x, ())[0]


def bits_of(x):
  return np.asarray(x).view(f'u{np.asarray(x).itemsize}')


def relative_error(x_hat, x):
  return float(jnp.linalg.norm(x_hat - x) / jnp.linalg.norm(x))


@every_codec
@pytest.mark.parametrize('error_feedback', [False, True])
def test_any_shape_and_dtype_comes_back(name, error_feedback):
  made = jitted(name, error_feedback=error_feedback)
  x = tuple(
    normal(shape, dtype)
    for shape in SHAPES
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
  )
  encoded, cstate = made.encode(x, made.init(x))
  x_hat = made.decode(encoded)
  for leaf, leaf_hat in zip(x, x_hat, strict=True):
    assert leaf_hat.shape == leaf.shape
    assert leaf_hat.dtype == leaf.dtype
    assert np.isfinite(leaf_hat).all()
  assert jax.tree.leaves(cstate) == [] or error_feedback


@every_codec
@pytest.mark.parametrize('size', [0, 1, 7, 255, 256, 257, 1000])
def test_nothing_on_the_wire_is_padding(name, size):
  made, encoded = encode(name, normal((size,)))
  assert made.bits_per_value == BITS[name]
  assert encoded.codes.nbytes == -(-size * BITS[name] // 8)
  assert encoded.scales.dtype == jnp.bfloat16
  assert encoded.scales.size == (-(-size // 256) if name in SCALED else 0)
  num_codes, dtype, num_scales = made.wire_layout(size)
  assert encoded.codes.shape == (num_codes,)
  assert encoded.codes.dtype == dtype
  assert encoded.scales.shape == (num_scales,)


@every_codec
def test_codes_are_the_same_jitted_and_not(name):
  x = normal((3, 700))
  _, compiled = encode(name, x)
  encoded, _ = codec(name).encode(x, ())
  np.testing.assert_array_equal(bits_of(encoded.codes), bits_of(compiled.codes))
  np.testing.assert_array_equal(encoded.scales, compiled.scales)


@every_codec
def test_decoding_gives_the_same_bits_however_it_is_compiled(name):
  dtypes = jnp.float32, jnp.bfloat16, jnp.float16
  x = tuple(normal((3, 100), dtype) for dtype in dtypes)
  base = tuple(normal((3, 100), dtype, seed=1) for dtype in dtypes)
  made = codec(name)
  encoded, _ = jitted(name).encode(x, ())
  x_hat = made.decode(encoded)  # Operation by operation.
  apart = jax.tree.map(jnp.add, base, x_hat)

  @jax.jit
  def fused(base, x, encoded):
    again, _ = made.encode(x, ())
    return (
      jax.tree.map(jnp.add, base, made.decode(encoded)),
      jax.tree.map(jnp.add, base, made.decode(again)),
    )

  for compiled, expected in [
    (jitted(name).decode(encoded), x_hat),
    (fused(base, x, encoded)[0], apart),
    (fused(base, x, encoded)[1], apart),
  ]:
    for one, other in zip(compiled, expected, strict=True):
      np.testing.assert_array_equal(bits_of(one), bits_of(other))


@every_codec
def test_vmap_encodes_learner_by_learner(name):
  x = normal((3, 2, 150))
  made, one = encode(name, x[1])
  encoded = jax.jit(jax.vmap(lambda x: made.encode(x, made.init(x))[0]))(x)
  np.testing.assert_array_equal(bits_of(encoded.codes[1]), bits_of(one.codes))
  np.testing.assert_array_equal(
    jax.jit(jax.vmap(made.decode))(encoded)[1], jax.jit(made.decode)(one)
  )


@pytest.mark.parametrize(
  ('name', 'low', 'high'),
  [
    ('f32', 0.0, 0.0),
    # Rounding to 8 bits: uniform over one unit in the last place of 2^-8 to
    # 2^-7 of the value.
    ('bf16', 0.0015, 0.0018),
    # Uniform over one scale, 2.9 sigma / limit: 2.9 / 127 / sqrt(12) = 0.0066,
    # and up to 2^-7 more since the scale is rounded up.
    ('int8', 0.0064, 0.0072),
    ('int4', 0.115, 0.130),
    # Nearest powers of two, mantissas distributed log-uniformly: 0.194.
    ('e3m0', 0.190, 0.200),
    # The best three levels give 0.436.
    ('int2', 0.43, 0.45),
  ],
)
def test_error_on_normally_distributed_values(name, low, high):
  x = normal((256 * 100,))
  made, encoded = encode(name, x)
  assert low <= relative_error(made.decode(encoded), x) <= high


@every_scaled_codec
@pytest.mark.parametrize('exponent', [-30, 0, 30])
def test_error_of_every_value(name, exponent):
  x = np.asarray(normal((40, 256))) * np.float32(2.0**exponent)
  made, encoded = encode(name, jnp.asarray(x))
  x_hat = np.asarray(made.decode(encoded))
  peak = np.abs(x).max(axis=1, keepdims=True)
  if name == 'e3m0':
    # The nearest power of two is at most a third away (1.5 goes to 1 or 2); at
    # the lower end half of the lowest level, which is peak / 1.5 / 64 at least
    # and peak * 4/3 / 64 at most.
    bound = np.maximum(np.abs(x) / 3, peak * 4 / 3 / 128)
  elif name == 'int2':
    # Half a level, or what lies beyond it; level: 1.5 times the mean, rounded.
    level = 1.5 * np.abs(x).mean(axis=1, keepdims=True) * (1 + 2.0**-7)
    bound = np.maximum(level / 2, np.abs(x) - level * (1 - 2.0**-7))
  else:
    # Half a scale; scale: peak / limit, rounded up to bfloat16.
    limit = {'int8': 127, 'int4': 7}[name]
    bound = np.broadcast_to(peak / limit * (1 + 2.0**-7) / 2, x.shape)
  assert (np.abs(x_hat - x) <= bound * (1 + 1e-5)).all()


@every_scaled_codec
def test_blocks_do_not_touch_each_other(name):
  x = normal((512,)).at[256:].multiply(1e6)
  made, encoded = encode(name, x)
  _, alone = encode(name, x[:256])
  np.testing.assert_array_equal(made.decode(encoded)[:256], made.decode(alone))


@every_codec
def test_zeros_decode_to_zeros(name):
  x = normal((700,)).at[256:512].set(0)
  made, encoded = encode(name, x)
  x_hat = made.decode(encoded)
  np.testing.assert_array_equal(x_hat[256:512], np.zeros(256))
  assert np.isfinite(x_hat).all()


@every_scaled_codec
def test_tiny_blocks_decode_to_tiny_values(name):
  for tiny in (1e-45, 1e-40, 1.2e-38, 3e-38, 1e-36):
    x = np.asarray(normal((300,))) * np.float32(tiny)
    made, encoded = encode(name, jnp.asarray(x))
    x_hat = np.asarray(made.decode(encoded))
    # Products below the smallest normal number, 1.2e-38, become zero; the rest
    # is as accurate as ever.
    assert (np.abs(x_hat - x) <= np.abs(x).max()).all()
    subnormal = (x_hat != 0) & (np.abs(x_hat) < np.finfo(np.float32).tiny)
    assert not subnormal.any()


@every_scaled_codec
def test_huge_blocks_stay_finite(name):
  x = jnp.where(normal((256,)) > 0, 3.4e38, -3.3e38).astype(jnp.float32)
  made, encoded = encode(name, x)
  x, x_hat = np.float64(x), np.float64(made.decode(encoded))
  assert np.isfinite(x_hat).all()
  # 7 times the largest fitting bfloat16 is 3.396e38; e3m0 has no power of two
  # above 1.7e38, and int2 no scale above 2^126 = 0.85e38.
  error = np.linalg.norm(x_hat - x) / np.linalg.norm(x)
  assert error < {'int8': 0.01, 'int4': 0.03, 'e3m0': 0.51, 'int2': 0.76}[name]


@every_codec
@pytest.mark.parametrize('num_blocks', [3, 300])
def test_what_is_not_finite_is_never_silently_cleaned(name, num_blocks):
  made = jitted(name, block_size=64)
  for bad in (np.nan, -np.nan, np.inf, -np.inf):
    # One bad value in each block, at another place in each; one block of them.
    x = np.array(normal((num_blocks, 64)))
    x[np.arange(num_blocks), np.arange(num_blocks) % 64] = bad
    x[0] = bad
    x_hat = np.asarray(made.decode(made.encode(jnp.asarray(x), ())[0]))
    assert (~np.isfinite(x_hat)).any(axis=1).all()


def test_low_precision_values_are_rounded_in_every_compilation():
  # 1 + 2^-10 is not a bfloat16: however it is fused, it must come back as 1.
  x = jnp.full((8,), 1 + 2.0**-10)
  made = codec('bf16')
  both = jax.jit(lambda x: made.decode(made.encode(x, ())[0]))
  np.testing.assert_array_equal(both(x), np.ones(8))


@every_codec
def test_error_feedback_keeps_what_was_left_out(name):
  made = jitted(name, error_feedback=True)
  x = {'a': normal((300,)), 'b': normal((4, 5), jnp.bfloat16)}
  encoded, residual = made.encode(x, made.init(x))
  x_hat = made.decode(encoded)
  for key in x:
    assert residual[key].dtype == jnp.float32
    np.testing.assert_array_equal(
      residual[key],
      x[key].astype(jnp.float32) - x_hat[key].astype(jnp.float32),
    )
  encoded, _ = made.encode(x, residual)
  alone, expected = encode(name, x['a'] + residual['a'])
  np.testing.assert_array_equal(
    made.decode(encoded)['a'], alone.decode(expected)
  )


@every_scaled_codec
def test_error_feedback_makes_the_sum_right(name):
  # What is sent in sum differs from what was meant by the last residual only,
  # so the error of the mean of 64 rounds would be a 64th of one round's, if
  # residuals did not grow. They do with int2, which sends 1.2 of 3 sigma.
  x = normal((256,))
  made = jitted(name, error_feedback=True)
  cstate, total = made.init(x), jnp.zeros_like(x)
  for _ in range(64):
    encoded, cstate = made.encode(x, cstate)
    total += made.decode(encoded)
  np.testing.assert_allclose(total + cstate, 64 * x, rtol=1e-3, atol=1e-3)
  one_round = relative_error(made.decode(made.encode(x, 0 * x)[0]), x)
  assert relative_error(total / 64, x) < one_round / 4


def test_error_feedback_forgets_what_was_not_finite():
  made = jitted('int4', error_feedback=True)
  x = normal((512,)).at[3].set(jnp.nan)
  encoded, residual = made.encode(x, made.init(x))
  assert np.isnan(made.decode(encoded)).any()
  assert np.isfinite(residual).all()


def test_codecs_work_under_sharding():
  mesh = jax.make_mesh(
    (4,), ('x',), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
  )
  spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
  x = normal((8, 512))
  made = codec('int4')
  encoded, _ = jax.jit(made.encode)(jax.device_put(x, spread), ())
  _, alone = encode('int4', x)
  np.testing.assert_array_equal(encoded.codes, alone.codes)


def test_errors_give_rule_value_and_fix():
  with pytest.raises(ValueError, match="'int3' is unknown; choose one of f32"):
    codec('int3')
  with pytest.raises(ValueError, match='block_size=100 must be a positive mul'):
    codec('int4', block_size=100)
  with pytest.raises(ValueError, match='floating-point arrays, got dtype int'):
    encode('int4', jnp.arange(3))
  _, encoded = encode('int8', jnp.ones(3))
  with pytest.raises(ValueError, match='int4 needs 2 codes and 1 scales'):
    codec('int4').decode(encoded)
