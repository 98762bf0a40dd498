"""Tests of the rules by which learners adopt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from decoupled_diloco.ops.adopt import AdoptOptions, adopt
from decoupled_diloco.ops.codecs import codec

jit_adopt = jax.jit(adopt, static_argnums=0)

LOCAL = {'w': jnp.array([5.0, 1.0])}
PUBLISHED = {'w': jnp.array([8.0, 2.0])}
BASE = {'w': jnp.array([9.0, 3.0])}


def test_overwrite():
  adopted = jit_adopt('overwrite', LOCAL, PUBLISHED, BASE, alpha=0.0)
  assert_array_equal(adopted['w'], [8.0, 2.0])


@pytest.mark.parametrize(
  ('alpha', 'expected'),
  # (1 - alpha) * published + alpha * local
  [(0.0, [8, 2]), (0.25, [7.25, 1.75]), (1.0, [5, 1])],
)
def test_mix_weighs_the_local_value(alpha, expected):
  adopted = jit_adopt('mix', LOCAL, PUBLISHED, BASE, alpha=alpha)
  assert_array_equal(adopted['w'], expected)


def test_rebase_keeps_all_progress_when_nothing_was_merged():
  adopted = jit_adopt('rebase', LOCAL, PUBLISHED, BASE, None, alpha=0.0)
  # 8 + (5 - 9), 2 + (1 - 3)
  assert_array_equal(adopted['w'], [4.0, 0.0])


def test_rebase_keeps_what_no_merge_has_seen():
  # Handed over at 7: base - local = 2, coarsely quantised. One further local
  # step of -2 follows.
  base, handed_over = jnp.full(256, 9.0), jnp.linspace(7, 7.1, 256)
  int4 = codec('int4')
  encoded, _ = int4.encode(base - handed_over, ())
  seen = base - int4.decode(encoded)
  local = handed_over - 2
  # One learner, outer SGD with lr 1: the syncer publishes what it saw.
  adopted = adopt('rebase', local, seen, base, seen, alpha=0.0)
  # So the learner is where it was: nothing lost, the quantisation included.
  assert np.abs(np.asarray(seen - handed_over)).max() > 0.01
  assert_allclose(adopted, local, rtol=1e-6)


@pytest.mark.parametrize('rule', ['overwrite', 'mix', 'rebase'])
def test_dtypes_stay_and_arithmetic_is_float32(rule):
  local = (jnp.ones(2, jnp.bfloat16),)
  published = (jnp.full(2, 1 + 2.0**-7),)
  base = (jnp.full(2, 1.0),)
  (adopted,) = jit_adopt(rule, local, published, base, alpha=0.5)
  assert adopted.dtype == jnp.bfloat16
  # 1 + 2^-7 is a bfloat16. The mean 1 + 2^-8 lies between two, and goes to the
  # even one, 1.
  expected = 1.0 if rule == 'mix' else 1 + 2.0**-7
  assert_array_equal(adopted.astype(jnp.float32), [expected] * 2)


def test_options_are_validated():
  assert AdoptOptions() == AdoptOptions('rebase', 0.0)
  assert AdoptOptions('mix', 0.5).alpha == 0.5
  with pytest.raises(ValueError, match="rule='merge' must be one of overwrite"):
    AdoptOptions('merge')
  with pytest.raises(ValueError, match=r'alpha=1\.5 must be from 0 to 1'):
    AdoptOptions('mix', 1.5)
  with pytest.raises(ValueError, match=r'alpha=0\.5 has no effect'):
    AdoptOptions('rebase', 0.5)
  with pytest.raises(ValueError, match='must be one of'):
    adopt('merge', LOCAL, PUBLISHED, BASE, alpha=0.0)
