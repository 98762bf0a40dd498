import numpy as np
import pytest

from decoupled_diloco.protocol.weights import (
  StalenessOptions,
  contribution_weight,
)


def test_weight_is_quantity_times_quality():
  # 100 tokens in 10 steps: 100 * (100 / 10) = 1000.
  assert contribution_weight(100.0, 10.0) == 1000.0
  # Twice the tokens in as many steps count four times: tokens**2 / steps.
  assert contribution_weight(200.0, 10.0) == 4000.0


def test_weight_of_arrays():
  weights = contribution_weight(np.array([100.0, 30.0]), np.array([10.0, 3.0]))
  np.testing.assert_array_equal(weights, [1000.0, 300.0])


def test_staleness_discounts_by_version():
  options = StalenessOptions(staleness_discount=0.5, max_staleness=4)
  # 1000 * 0.5 ** 2 = 250.
  assert options.discounted(1000.0, 2) == 250.0
  assert options.discounted(1000.0, 0) == 1000.0
  assert StalenessOptions().discounted(1000.0, 3) == 1000.0


def test_a_base_may_be_so_old_and_no_older():
  options = StalenessOptions(max_staleness=2)
  assert options.objection(7, 7) is None
  assert options.objection(7, 5) is None
  assert options.objection(7, 4) == (
    'base version 4 is 3 versions old, max_staleness=2'
  )


def test_a_base_must_exist():
  options = StalenessOptions(max_staleness=2)
  assert options.objection(7, 8) == 'base version 8 is ahead of version 7'
  assert options.objection(0, -1) == 'base version -1 must not be negative'


@pytest.mark.parametrize('discount', [0.0, -0.5, 1.5])
def test_discount_must_be_a_share(discount):
  with pytest.raises(ValueError, match=r'must be in \(0, 1\]'):
    StalenessOptions(staleness_discount=discount)


def test_staleness_must_not_be_negative():
  with pytest.raises(ValueError, match='must not be negative'):
    StalenessOptions(max_staleness=-1)
