"""Small global models, and what learners would send them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.ops.outer import outer_optimizer
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.wire_format import (
  WireOptions,
  wire_format,
  wire_shapes,
)

P = 2
M = 4
EXACT = WireOptions(up='f32', down='f32', down_error_feedback=False)
UPDATES = [
  WireOptions(up='f32', down=name, down_error_feedback=feedback, block_size=8)
  for name in ('f32', 'bf16', 'int8', 'int4', 'e3m0', 'int2')
  for feedback in ((True, False) if name in ('f32', 'int4') else (True,))
]
BF16_VALUE = WireOptions(
  up='f32', down='bf16', down_form='value', down_error_feedback=False
)


def make_params(dtype=jnp.float32):
  """Stacked layers, an embedding, a scalar; sizes that leave short blocks."""
  rng = np.random.default_rng(0)
  shapes = {
    'embed': (5, 3),
    'layers': {'w': (2, 4, 7)},
    'scale': (),
  }
  return jax.tree.map(
    lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


PLAN = fragment(make_params(), num_fragments=P)


def make_model(wire=EXACT, *, params=None, merge='rda', num_learners=M, lr=0.3):
  params = make_params() if params is None else params
  return GlobalModel(
    PLAN,
    params,
    tx=outer_optimizer(lr, 0.9),
    merge=merge,
    wire=wire_format(wire),
    num_learners=num_learners,
  )


def random_delta(p: int, seed: int, size: float = 0.1):
  rng = np.random.default_rng([p, seed])
  return tuple(
    jnp.asarray(size * rng.normal(size=shape.shape), jnp.float32)
    for shape in PLAN.shapes(p)
  )


@functools.cache
def make_encoder(wire):
  up = wire_format(wire).up
  return jax.jit(lambda delta: up.encode(delta, up.init(delta))[0])


def payload_of(delta, wire=EXACT) -> bytes:
  return payloads.to_bytes(make_encoder(wire)(delta))


def merge_one(model, p: int, delta, wire=EXACT):
  """Merges the contribution of learner 0 alone."""
  return model.merge(p, {0: 1.0}, {0: payload_of(delta, wire)})


def received(codec, p: int, payload: bytes):
  return payloads.from_bytes(codec, wire_shapes(PLAN, p), payload)


def value_of(model, p: int, wire=EXACT):
  """A fragment as a joining learner gets it."""
  codec = wire_format(wire).value
  return codec.decode(received(codec, p, model.value_payload(p)))


def assert_same_bits(left, right):
  """Equal to the last bit, the signs of zeros included."""

  def check(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(
      np.atleast_1d(a).view(np.uint8), np.atleast_1d(b).view(np.uint8)
    )

  jax.tree.map(check, left, right)
