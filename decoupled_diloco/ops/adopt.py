"""Adoption: a learner replaces its copy of a fragment by a newer published one.

References: overwriting, Decoupled DiLoCo (Douillard et al., arXiv 2604.21428);
mixing, Streaming DiLoCo (Douillard et al., arXiv 2501.18512, section 2.3).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from decoupled_diloco.ops.array_types import Leaf, Params, Scalar

RULES = ('overwrite', 'mix', 'rebase')


@dataclasses.dataclass(frozen=True)
class AdoptOptions:
  """How learners adopt.

  Attributes:
    rule: 'overwrite' (as published), 'mix' or 'rebase'; see `adopt`. The
      default goes beyond what is published: it loses no work, and the model is
      as good where learners are equal and adopt within a scan, and better where
      they do not (the study configs/lab/adoption.py).
    alpha: weight of the *local* value in 'mix', from 0 (as 'overwrite') to 1
      (nothing is adopted).
  """

  rule: str = 'rebase'
  alpha: float = 0.0

  def __post_init__(self) -> None:
    _check_rule(self.rule)
    if not 0 <= self.alpha <= 1:
      raise ValueError(
        f'alpha={self.alpha} must be from 0 to 1: it is the weight of the '
        'local value in rule mix.'
      )
    if self.alpha and self.rule != 'mix':
      raise ValueError(
        f'alpha={self.alpha} has no effect with rule={self.rule!r}; '
        "use rule='mix' or alpha=0."
      )


def adopt(
  rule: str,
  local: Params,
  published: Params,
  base: Params,
  seen: Params | None = None,
  *,
  alpha: float | Scalar,
) -> Params:
  """The learner's new values of a fragment.

  - 'overwrite': published.
  - 'mix': (1 - alpha) * published + alpha * local.
  - 'rebase': published + (local - reference), that is, published plus the local
    progress that no merge has seen yet. If the learner's hand-over was merged,
    the reference is what the syncer saw of it, so that what quantisation left
    out stays; if it was not, it is the base, and all progress stays.

  Example:

  >>> import jax.numpy as jnp
  >>> local, published, base = jnp.array(5.0), jnp.array(8.0), jnp.array(9.0)
  >>> float(adopt('mix', local, published, base, alpha=0.25))  # 6 + 1.25
  7.25
  >>> float(adopt('rebase', local, published, base, alpha=0.0))  # 8 + (5 - 9)
  4.0
  >>> seen = jnp.array(6.0)  # 9 - decode(encode(9 - local at the hand-over))
  >>> float(adopt('rebase', local, published, base, seen, alpha=0.0))
  7.0

  Args:
    rule: static.
    local: pytree of the learner's values; the result has their dtypes.
    published: the newer version.
    base: the version that was adopted last.
    seen: base - decode(encode(delta)) of the hand-over that was merged into
      `published`, or None if none was.
    alpha: weight of the local value in 'mix'.

  Returns:
    Pytree like `local`; the arithmetic is float32 at least.

  Raises:
    ValueError: unknown rule.
  """
  _check_rule(rule)
  if rule == 'overwrite':
    return jax.tree.map(
      lambda l, new: jnp.asarray(new).astype(l.dtype), local, published
    )
  if rule == 'mix':
    return _map_float32(
      lambda l, new: (1 - alpha) * new + alpha * l, local, published
    )
  reference = base if seen is None else seen
  return _map_float32(
    lambda l, new, ref: new + (l - ref), local, published, reference
  )


def _check_rule(rule: str) -> None:
  if rule not in RULES:
    raise ValueError(
      f'Adoption rule={rule!r} must be one of {", ".join(RULES)}.'
    )


def _map_float32(
  function: Callable[..., Any], local: Params, *others: Params
) -> Params:
  def mapped(l: Leaf, *values: Leaf) -> Leaf:
    dtype = jnp.float64 if l.dtype == jnp.float64 else jnp.float32
    wide = [jnp.asarray(value).astype(dtype) for value in (l, *values)]
    return function(*wide).astype(l.dtype)

  return jax.tree.map(mapped, local, *others)
