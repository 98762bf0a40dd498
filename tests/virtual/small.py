"""A linear regression on which virtual clusters train in milliseconds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decoupled_diloco import tasks
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.quorum import QuorumOptions
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.syncer_state import BudgetOptions, SyncerOptions
from decoupled_diloco.protocol.weights import StalenessOptions
from decoupled_diloco.simulate.options import SpeedOptions
from decoupled_diloco.training.outer_options import OuterOptions
from decoupled_diloco.training.wire_format import WireOptions
from decoupled_diloco.virtual import (
  LearnerSetup,
  VirtualCluster,
  VirtualSetup,
)

EXACT = WireOptions(up='f32', down='f32', down_error_feedback=False)
INT4 = WireOptions(up='int4', down='int4', block_size=8)
K = 2
_HALF = SpeedOptions(step_seconds=0.5)


def _init(rng):
  keys = jax.random.split(rng, 2)
  return {
    'bias': jnp.zeros(3),
    'first': jax.random.normal(keys[0], (5, 4)),
    'second': jax.random.normal(keys[1], (4, 3)),
  }


def _loss(params, batch, rng):
  del rng
  hidden = jnp.tanh(batch['x'] @ params['first'])
  out = hidden @ params['second'] + params['bias'][None]
  return jnp.mean(jnp.square(out - batch['y']))


TASK = tasks.jax_task(
  _init, _loss, num_tokens=lambda batch: batch['x'].shape[0]
)


def batches(learner: int, size: int = 4):
  """The data of a learner: other numbers in every batch."""

  def read(first: int, count: int):
    drawn = []
    for number in range(first, first + count):
      rng = np.random.default_rng((learner, number))
      x = rng.normal(size=(size, 5)).astype(np.float32)
      drawn.append({'x': x, 'y': np.sin(x[:, :3])})
    return jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)

  return read


def setup(
  M: int = 2,
  P: int = 3,
  k_min: int = 1,
  rounds: int = 12,
  limit: int = 4,
  sizes: tuple[int, ...] = (),
  learners: tuple[LearnerSetup, ...] = (),
  syncer: dict[str, Any] | None = None,
  **fields: Any,
) -> VirtualSetup:
  """A cluster whose scans of two steps take a second, unless told otherwise."""
  sizes = sizes or (4,) * M
  options = SyncerOptions(
    run_id='run',
    layout='layout',
    schedule=ScheduleOptions(K * P, P),
    membership=MembershipOptions(M, start_timeout_seconds=1.5),
    quorum=QuorumOptions(k_min),
    grace=GraceOptions(),
    staleness=StalenessOptions(),
    budget=BudgetOptions(rounds),
    max_rounds_in_flight=limit,
  )
  defaults: dict[str, Any] = {
    'inner': optax.adam(0.05),
    'wire': EXACT,
    # As published.
    'adopt': AdoptOptions('overwrite'),
    'outer': OuterOptions(gain=1.0, momentum=0.0, merge='mean'),
  }
  setup = VirtualSetup(
    task=TASK,
    plan=fragment(jax.eval_shape(_init, jax.random.key(0)), P),
    learners=learners
    or tuple(LearnerSetup(batches(m, sizes[m]), speed=_HALF) for m in range(M)),
    syncer=dataclasses.replace(options, **(syncer or {})),
    **(defaults | fields),
  )
  return setup


def same(left: Any, right: Any) -> bool:
  """Whether two pytrees hold the same bits."""
  pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
  return all(
    np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
  )


def close(left: Any, right: Any) -> None:
  """Asserts that two pytrees are equal to float32 rounding."""
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    left,
    right,
  )


def run(**fields):
  """The result of a small cluster."""
  return VirtualCluster(setup(**fields)).run()


def contributions(result, learner):
  """(time, contribution) as they came to the syncer."""
  return [
    (event.now, event.message)
    for event, _ in result.steps
    if isinstance(event, ev.MessageArrived)
    and isinstance(event.message, msg.Contribution)
    and event.message.learner == learner
  ]
