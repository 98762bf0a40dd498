"""The inner optimizer and its learning rate.

The learning rate is a function of the run's global step, never of the
optimizer's own counter: a learner that rejoins, with a fresh or an old
optimizer state, continues where the run is.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

Step = int | Int[Array, '']
LearningRate = Callable[[Step, Step], Float[Array, '']]

# A `rejoin_step` so long ago that no warm-up is left of it.
NEVER = -(2**30)

_DIRECTIONS = {
  'adamw': lambda o: optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps),
  'lion': lambda o: optax.scale_by_lion(b1=o.b1, b2=o.b2),
  'sgd': lambda o: optax.trace(decay=o.b1) if o.b1 else optax.identity(),
}
_DECAYS = ('cosine', 'linear', 'constant')


@dataclasses.dataclass(frozen=True)
class InnerOptions:
  """Optimizer of the steps within a learner.

  Attributes:
    optimizer: 'adamw', 'lion' or 'sgd'.
    learning_rate: peak, reached after `warmup_steps`.
    b1: decay of the first moment; the momentum of 'sgd'.
    b2: decay of the second moment.
    eps: added to Adam's denominator.
    weight_decay: decoupled, multiplied by the learning rate.
    clip_norm: largest global norm of a gradient; 0 does not clip.
    warmup_steps: global steps of linear warm-up.
    decay: 'cosine', 'linear' or 'constant', after the warm-up.
    decay_steps: global step at which the decay has ended.
    final_fraction: of the peak, from `decay_steps` on.
    rejoin_warmup_steps: steps over which a learner with a fresh optimizer
      state goes from 0 to the run's learning rate; 0 for none. By default the
      memory of the second moment, 1 / (1 - b2): until that is filled, Adam's
      steps are many times longer than those of its peers.
  """

  optimizer: str = 'adamw'
  learning_rate: float = 3e-3
  b1: float = 0.9
  b2: float = 0.99
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  warmup_steps: int = 50
  decay: str = 'cosine'
  decay_steps: int = 1000
  final_fraction: float = 0.05
  rejoin_warmup_steps: int = 100

  def __post_init__(self):
    for name, values in (('optimizer', _DIRECTIONS), ('decay', _DECAYS)):
      if getattr(self, name) not in values:
        raise ValueError(
          f'{name}={getattr(self, name)!r} is unknown; '
          f'choose one of {", ".join(map(repr, values))}.'
        )
    if not self.learning_rate > 0.0:
      raise ValueError(
        f'learning_rate={self.learning_rate} must be above 0; 3e-3 is a start.'
      )
    for name in ('b1', 'b2'):
      if not 0.0 <= getattr(self, name) < 1.0:
        raise ValueError(
          f'{name}={getattr(self, name)} must be in [0, 1); 0.9 is usual.'
        )
    for name in (
      'eps',
      'weight_decay',
      'clip_norm',
      'warmup_steps',
      'rejoin_warmup_steps',
    ):
      if not getattr(self, name) >= 0:
        raise ValueError(
          f'{name}={getattr(self, name)} must not be negative; use 0 for none.'
        )
    if not 0.0 <= self.final_fraction <= 1.0:
      raise ValueError(
        f'final_fraction={self.final_fraction} must be in [0, 1]; it is a '
        'share of learning_rate.'
      )
    if self.decay != 'constant' and self.decay_steps <= self.warmup_steps:
      raise ValueError(
        f'decay_steps={self.decay_steps} must exceed '
        f'warmup_steps={self.warmup_steps}; set it to the steps of the whole '
        "run, or decay='constant'."
      )


def inner_optimizer(options: InnerOptions) -> optax.GradientTransformation:
  """Clipping, direction, weight decay, and an injected learning rate.

  With 'adamw' the updates are those of `optax.adamw` after
  `optax.clip_by_global_norm`. The learning rate is a leaf of the state, which
  `set_learning_rate` sets in every step.
  """
  parts = [
    _DIRECTIONS[options.optimizer](options),
    optax.inject_hyperparams(
      optax.scale_by_learning_rate, hyperparam_dtype=jnp.dtype('float32')
    )(learning_rate=options.learning_rate),
  ]
  if options.weight_decay:
    parts.insert(1, optax.add_decayed_weights(options.weight_decay))
  if options.clip_norm:
    parts.insert(0, optax.clip_by_global_norm(options.clip_norm))
  return optax.chain(*parts)


def learning_rate(
  options: InnerOptions, step: Step, rejoin_step: Step = NEVER
) -> Float[Array, '']:
  """The learning rate of the step that follows `step` finished ones.

  Args:
    options: see there. Step 0 already moves: its rate is peak / warmup_steps.
    step: global step, counted over the whole run.
    rejoin_step: global step at which this learner began with a fresh
      optimizer state in the middle of the run.

  Returns:
    A float32 scalar; jit-able in both steps.
  """
  peak, warmup = options.learning_rate, options.warmup_steps
  floor = peak * options.final_fraction
  span = options.decay_steps - warmup
  after = {
    'cosine': lambda: optax.cosine_decay_schedule(
      peak, span, options.final_fraction
    ),
    'linear': lambda: optax.linear_schedule(peak, floor, span),
    'constant': lambda: optax.constant_schedule(peak),
  }[options.decay]()
  before = optax.linear_schedule(peak / max(warmup, 1), peak, warmup - 1)
  step = jnp.asarray(step, jnp.int32)
  # Schedules of optax divide, so they want a float: exact to 2**24 steps.
  rate = jnp.asarray(
    optax.join_schedules([before, after], [warmup])(step.astype(jnp.float32)),
    jnp.float32,
  )
  if options.rejoin_warmup_steps:
    since = (step - jnp.asarray(rejoin_step, jnp.int32) + 1).astype(jnp.float32)
    rate = rate * jnp.clip(since / options.rejoin_warmup_steps, 0.0, 1.0)
  return rate


def set_learning_rate(opt_state: Any, rate: Float[Array, '']) -> Any:
  """Sets every injected `learning_rate` in an optax state.

  It finds what `optax.inject_hyperparams` put there, at any depth; a state
  without any is returned as it is.
  """

  def is_injected(path, leaf) -> bool:
    keys = [getattr(part, 'key', getattr(part, 'name', None)) for part in path]
    return keys[-2:] == ['hyperparams', 'learning_rate']

  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: (
      rate.astype(leaf.dtype) if is_injected(path, leaf) else leaf
    ),
    opt_state,
  )
