"""The codecs that options name, and what both ends must agree on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.training.wire_format import (
  WireOptions,
  apply_update,
  wire_format,
  wire_shapes,
)

SHAPES = {
  'a': jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
  'b': jax.ShapeDtypeStruct((4,), jnp.float32),
}


def test_the_options_name_the_codecs():
  up, down, value, form = wire_format(
    WireOptions(up='int8', up_error_feedback=True, down='e3m0', block_size=64)
  )
  assert (up.name, up.block_size, up.error_feedback) == ('int8', 64, True)
  assert (down.name, down.block_size, down.error_feedback) == ('e3m0', 64, True)
  assert form == 'update'
  # Updates build on the exact version before: whoever joins gets that.
  assert (value.name, value.error_feedback) == ('f32', False)


@pytest.mark.parametrize('down', ['bf16', 'f32'])
def test_joiners_get_values_as_all_others_do(down):
  formats = wire_format(
    WireOptions(down=down, down_form='value', down_error_feedback=False)
  )
  assert formats.value.name == formats.down.name == down


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'up': 'int3'}, "'int3' is unknown; choose one of"),
    ({'down': 'fp8'}, "'fp8' is unknown; choose one of"),
    ({'block_size': 100}, 'block_size=100 must be a positive multiple of 8'),
    ({'down_form': 'delta'}, "down_form='delta' must be 'update' or 'value'"),
    (
      {'down': 'int4', 'down_form': 'value', 'down_error_feedback': False},
      "down='int4' is too coarse for down_form='value'",
    ),
    (
      {'down': 'bf16', 'down_form': 'value'},
      "down_error_feedback=True needs down_form='update'.* Set it to False",
    ),
  ],
)
def test_options_check_themselves(settings, message):
  with pytest.raises(ValueError, match=message):
    WireOptions(**settings)


def test_whatever_the_parameters_are_float32_travels():
  plan = fragment(SHAPES, num_fragments=2)
  shapes = [shape for p in range(2) for shape in wire_shapes(plan, p)]
  assert {shape.shape for shape in shapes} == {(2, 3), (4,)}
  assert {shape.dtype for shape in shapes} == {jnp.dtype(jnp.float32)}


def test_an_update_is_added():
  """By hand: a block's scale is its largest magnitude, 14, over 7, hence 2."""
  formats = wire_format(WireOptions(down_error_feedback=False))
  values = (jnp.array([1.0, 2.0, 3.0]),)
  encoded, _ = formats.down.encode((jnp.array([14.0, -2.0, 0.9]),), ())
  (new,) = apply_update(formats, values, encoded)
  np.testing.assert_array_equal(new, [15.0, 0.0, 3.0])
