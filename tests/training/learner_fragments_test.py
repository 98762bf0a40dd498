"""What a learner does with a fragment, as pure functions."""

import jax.numpy as jnp
import pytest

from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.training.learner_fragments import (
  adopt_fragment,
  as_held,
  encode_fragment,
)
from decoupled_diloco.training.wire_format import WireOptions, wire_format

PARAMS = {'a': jnp.array([1.0, 2.0]), 'b': jnp.array([5.0])}
PLAN = fragment(PARAMS, num_fragments=2)
P = next(p for p in range(2) if PLAN.names(p) == ('a',))


def _wire(up, **options):
  return wire_format(
    WireOptions(up=up, down='f32', down_error_feedback=False, **options)
  )


def test_a_hand_over_is_global_minus_local():
  base = (jnp.array([4.0, 4.0]),)
  made = encode_fragment(
    PLAN, _wire('f32'), PARAMS, P, base, (), keeps_decoded=True
  )
  assert made.encoded[0].codes.tolist() == [3.0, 2.0]
  assert made.decoded is not None
  assert made.decoded[0].tolist() == [3.0, 2.0]
  made = encode_fragment(
    PLAN, _wire('f32'), PARAMS, P, base, (), keeps_decoded=False
  )
  assert made.decoded is None


def test_what_quantisation_leaves_out_is_the_residual():
  # A block's scale is the largest magnitude / 7: of 7 and 2.4 it is 1, so 2.4
  # becomes 2.
  wire = _wire('int4', up_error_feedback=True, block_size=8)
  base = (jnp.array([8.0, 4.4]),)
  residual = wire.up.init(base)
  made = encode_fragment(
    PLAN, wire, PARAMS, P, base, residual, keeps_decoded=True
  )
  assert made.decoded is not None
  assert made.decoded[0].tolist() == [7.0, 2.0]
  assert made.residual[0].tolist() == pytest.approx([0.0, 0.4], abs=1e-6)


@pytest.mark.parametrize(
  ('options', 'decoded', 'expected'),
  [
    (AdoptOptions('overwrite'), None, [10.0, 20.0]),
    # 0.75 of what is published and a quarter of 1 and 2.
    (AdoptOptions('mix', 0.25), None, [7.75, 15.5]),
    # All progress stays: 10 + (1 - 4), 20 + (2 - 4).
    (AdoptOptions('rebase'), None, [7.0, 18.0]),
    # The syncer saw 3 and 1 of it: 10 + (1 - (4 - 3)), 20 + (2 - (4 - 1)).
    (AdoptOptions('rebase'), (3.0, 1.0), [10.0, 19.0]),
  ],
)
def test_adoption(options, decoded, expected):
  adopted = adopt_fragment(
    PLAN,
    options,
    PARAMS,
    P,
    (jnp.array([10.0, 20.0]),),
    (jnp.array([4.0, 4.0]),),
    None if decoded is None else (jnp.array(decoded),),
  )
  assert adopted['a'].tolist() == expected
  assert adopted['b'] is PARAMS['b']  # Of another fragment.


def test_a_learner_of_lower_precision_holds_a_rounded_base():
  # Bfloat16 has 8 bits: above 256 it holds even numbers only.
  base = (jnp.array([257.0]),)
  assert as_held(base, (jnp.zeros(1, jnp.bfloat16),))[0].tolist() == [256.0]
  assert as_held(base, (jnp.zeros(1),))[0].tolist() == [257.0]
