"""Text generation with a trained `Transformer`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from decoupled_diloco.models import functional, transformer


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
  """How the next token is chosen.

  Attributes:
    temperature: logits are divided by it; 0 takes the most likely token.
    top_k: choose among so many most likely tokens; None: among all.
  """

  temperature: float = 1.0
  top_k: int | None = None

  def __post_init__(self):
    if not self.temperature >= 0.0:
      raise ValueError(
        f'temperature={self.temperature} must not be negative; use 0 for the '
        'most likely token, 1 for the distribution of the model.'
      )
    if self.top_k is not None and self.top_k < 1:
      raise ValueError(
        f'top_k={self.top_k} must be at least 1; use None for all tokens.'
      )


def sample(
  model_options: transformer.TransformerOptions,
  params: Any,
  prompt: Int[Array, 'batch prompt'],
  rng: PRNGKeyArray,
  num_tokens: int,
  options: SamplingOptions | None = None,
) -> Int[Array, 'batch prompt+num_tokens']:
  """Continues a prompt.

  Every new token is computed from the last `sequence_length` ones anew,
  without a cache: simple, and compiled once for a prompt's length.

  Args:
    model_options: of the model that was trained.
    params: its parameters, sharded or not.
    prompt: int32 token ids, at least one.
    rng: key of the choices; unused at temperature 0.
    num_tokens: how many to add.
    options: see there.

  Returns:
    The prompt and its continuation.

  Raises:
    ValueError: if the prompt is empty, or top_k exceeds the vocabulary.
  """
  options = SamplingOptions() if options is None else options
  if prompt.ndim != 2 or prompt.shape[1] < 1:
    raise ValueError(
      f'The prompt must be [batch, at least 1 token] but is {prompt.shape}; '
      'begin with a newline or a start token.'
    )
  if num_tokens < 1:
    raise ValueError(
      f'num_tokens={num_tokens} must be at least 1; ask for a token.'
    )
  if options.top_k is not None and options.top_k > model_options.vocab_size:
    raise ValueError(
      f'top_k={options.top_k} must be at most '
      f'vocab_size={model_options.vocab_size}; use None for all tokens.'
    )
  return _sample(model_options, num_tokens, options, params, prompt, rng)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sample(
  model_options: transformer.TransformerOptions,
  num_tokens: int,
  options: SamplingOptions,
  params: Any,
  prompt: Int[Array, 'batch prompt'],
  rng: PRNGKeyArray,
) -> Int[Array, 'batch total']:
  model = functional.functional(
    lambda rngs: transformer.Transformer(model_options, rngs=rngs)
  )
  batch, length = prompt.shape
  window = min(model_options.sequence_length, length + num_tokens)
  tokens = jnp.pad(prompt.astype(jnp.int32), ((0, 0), (0, num_tokens)))

  def extend(number: Array, tokens: Array) -> Array:
    known = length + number
    # Once the text is longer than the window, the window moves along; until
    # then what lies behind the known tokens is hidden by the causal mask.
    start = jnp.maximum(known - window, 0)
    zero = jnp.zeros((), jnp.int32)
    seen = jax.lax.dynamic_slice(tokens, (zero, start), (batch, window))
    logits = model.module(params, rng, False)(seen)
    last = jax.lax.dynamic_index_in_dim(
      logits, known - 1 - start, axis=1, keepdims=False
    )
    chosen = _choose(last, jax.random.fold_in(rng, number), options)
    return jax.lax.dynamic_update_slice(tokens, chosen[:, None], (zero, known))

  return jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_tokens), extend, tokens)


def _choose(
  logits: Float[Array, 'batch vocab'],
  rng: PRNGKeyArray,
  options: SamplingOptions,
) -> Int[Array, ' batch']:
  if options.temperature == 0.0:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  if options.top_k is None:
    return jax.random.categorical(rng, logits / options.temperature).astype(
      jnp.int32
    )
  best, ids = jax.lax.top_k(logits, options.top_k)
  place = jax.random.categorical(rng, best / options.temperature)
  return jnp.take_along_axis(ids, place[:, None], axis=-1)[:, 0]
