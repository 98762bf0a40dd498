"""Text generation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled_diloco.models import sampling
from decoupled_diloco.models.functional import functional
from decoupled_diloco.models.transformer import Transformer, TransformerOptions

OPTIONS = TransformerOptions(
  vocab_size=16, width=32, layers=1, heads=2, sequence_length=8
)
MODEL = functional(lambda rngs: Transformer(OPTIONS, rngs=rngs))
RNG = jax.random.key(0)
PROMPT = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)


@jax.jit
def run(params, tokens):
  return MODEL.module(params, RNG, False)(tokens)


@pytest.fixture(scope='module')
def params():
  return jax.jit(MODEL.init)(RNG)


def test_greedy_sampling_is_the_argmax_of_the_last_window(params):
  greedy = sampling.SamplingOptions(temperature=0.0)
  tokens = sampling.sample(OPTIONS, params, PROMPT, RNG, 8, greedy)
  assert tokens.shape == (2, 11)
  np.testing.assert_array_equal(tokens[:, :3], PROMPT)
  # Up to token 8 the window begins at the first token; 9 and 10 have more
  # than 8 predecessors, so there it has moved. All windows have one shape.
  starts = jnp.array([0, 1, 2])
  windows = jnp.stack([tokens[:, start : start + 8] for start in starts])
  choices = run(params, windows.reshape(6, 8)).argmax(-1).reshape(3, 2, 8)
  np.testing.assert_array_equal(tokens[:, 3:9], choices[0, :, 2:])
  np.testing.assert_array_equal(tokens[:, 9], choices[1, :, -1])
  np.testing.assert_array_equal(tokens[:, 10], choices[2, :, -1])


def test_top_1_is_greedy_at_any_temperature(params):
  hot = sampling.SamplingOptions(temperature=5.0, top_k=1)
  cold = sampling.SamplingOptions(temperature=0.0)
  np.testing.assert_array_equal(
    sampling.sample(OPTIONS, params, PROMPT, RNG, 4, hot),
    sampling.sample(OPTIONS, params, PROMPT, RNG, 4, cold),
  )


def test_samples_follow_the_distribution(params):
  count = 4000
  prompt = jnp.full((count, 1), 7, jnp.int32)
  tokens = sampling.sample(OPTIONS, params, prompt, RNG, 1)
  share = jnp.bincount(tokens[:, 1], length=16) / count
  logits = run(params, prompt[:1])[0, 0]
  # Standard deviation of a share is below sqrt(0.25 / 4000) = 0.008.
  np.testing.assert_allclose(share, jax.nn.softmax(logits), atol=0.04)
  narrow = sampling.SamplingOptions(top_k=3)
  tokens = sampling.sample(OPTIONS, params, prompt, RNG, 1, narrow)
  best = set(jax.lax.top_k(logits, 3)[1].tolist())
  assert set(np.unique(tokens[:, 1]).tolist()) == best


def test_arguments_are_checked(params):
  with pytest.raises(ValueError, match='temperature=-1'):
    sampling.SamplingOptions(temperature=-1.0)
  with pytest.raises(ValueError, match='top_k=0'):
    sampling.SamplingOptions(top_k=0)
  with pytest.raises(ValueError, match='at most vocab_size=16'):
    many = sampling.SamplingOptions(top_k=17)
    sampling.sample(OPTIONS, params, PROMPT, RNG, 1, many)
  with pytest.raises(ValueError, match='at least 1 token'):
    sampling.sample(OPTIONS, params, PROMPT[:, :0], RNG, 1)
  with pytest.raises(ValueError, match='num_tokens=0'):
    sampling.sample(OPTIONS, params, PROMPT, RNG, 0)
