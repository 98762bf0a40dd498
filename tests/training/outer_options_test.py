"""What is not configured follows from the run; what is wrong is said."""

import jax.numpy as jnp
import pytest

from decoupled_diloco.training.outer_options import OuterOptions


@pytest.mark.parametrize(
  ('options', 'gain', 'momentum'),
  [
    (OuterOptions(), 0.9 / (1 - 0.75**2), 0.75),
    (OuterOptions(gain=2.0), 2.0, 0.75),
    (OuterOptions(momentum=0.5), 1.2, 0.5),
    (OuterOptions(gain=2.0, momentum=0.5), 2.0, 0.5),
  ],
)
def test_what_is_not_given_follows_from_the_runs_length(
  options, gain, momentum
):
  tx = options.optimizer(outer_steps=64)
  updates, _ = tx.update(jnp.array(1.0), tx.init(jnp.array(1.0)))
  learning_rate = gain * (1 - momentum)
  assert float(updates) == pytest.approx(-learning_rate * (1 + momentum))


def test_options_check_themselves():
  with pytest.raises(ValueError, match='gain=0'):
    OuterOptions(gain=0.0)
  with pytest.raises(ValueError, match='momentum=1'):
    OuterOptions(momentum=1.0)
  with pytest.raises(ValueError, match="merge='median' must be one of"):
    OuterOptions(merge='median')
