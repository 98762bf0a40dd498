"""The exact trajectories of Streaming DiLoCo, by the machines and the ops.

Two scalars start at 1, in two fragments; an inner step subtracts 2 from each;
the outer optimizer is plain SGD with learning rate 2; H=6, and a fragment is
due every 3 steps, the first one first. The delta is taken tau steps before its
slot ends; at the slot's end the global value becomes G - 2 (G - theta), and
theta becomes (1 - alpha) G + alpha theta.

By hand, for tau=0 and alpha=0: at step 3 both scalars are 1 - 6 = -5, so the
first has the delta 6 and the global value 1 - 12 = -11, adopted at once; at
step 6 the second is 1 - 12 = -11, its delta 12, its global value 1 - 24 = -23;
at step 9 the first is -11 - 12 = -23, its delta 12, its global value -11 - 24 =
-35; and so on.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco import tasks
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.protocol import effects as fx
from tests.integration.array_cluster import ArrayCluster
from tests.protocol.cluster import syncer_options


def _trajectory(
  P: int,
  moving: tuple[int, int],
  alpha: float,
  max_rounds: int = 4,
  **settings,
):
  """Runs two identical learners; fragments other than `moving` stand still.

  Returns:
    Global values of the moving fragments after each of their merges, and the
    learners' values at the end.
  """
  names = [f'scalar{i}' for i in range(P)]
  like = {name: jnp.ones(()) for name in names}
  plan = fragment(like, num_fragments=P)
  movers = [plan.names(p)[0] for p in moving]

  def loss(params, batch, rng):
    del batch, rng
    return 2.0 * (params[movers[0]] + params[movers[1]])  # Its gradient is 2.

  H, slots = 6, 4
  cluster = ArrayCluster(
    syncer_options(
      M=2, k_min=2, H=H, P=P, rounds=100, max_rounds_in_flight=max_rounds
    ),
    [lambda: 1.0] * 2,
    task=tasks.jax_task(lambda rng: like, loss),
    plan=plan,
    inner=optax.sgd(1.0),
    outer=optax.sgd(2.0),
    batches=lambda m, step: np.zeros((H // P, 1), np.float32),
    adopt=AdoptOptions('mix', alpha),
    merge='mean',
    **settings,
  )
  # Until both learners have taken 15 steps and stand at that boundary.
  scans = 15 // (H // P)
  while min(learner.figures.scans for learner in cluster.learners) < scans:
    cluster.run(until=cluster.now + 1.0)
  merged = [
    [float(params[name]) for name in movers]
    for merge, params in zip(
      cluster.effects(fx.Merge), cluster.history, strict=True
    )
    if merge.fragment in moving
  ]
  thetas = [
    [float(local.params[name]) for name in movers] for local in cluster.locals
  ]
  assert thetas[0] == thetas[1]
  return merged[:slots], thetas[0]


@pytest.mark.parametrize(
  ('alpha', 'globals_', 'theta'),
  [
    (0.0, [[-11, 1], [-11, -23], [-35, -23], [-35, -47]], [-59, -53]),
    (1.0, [[-11, 1], [-11, -23], [-23, -23], [-23, -23]], [-29, -29]),
  ],
)
def test_without_overlap(alpha, globals_, theta):
  """Learners wait for the publication: tau = 0."""
  merged, thetas = _trajectory(
    2, (0, 1), alpha, on_lead_limit='wait', max_rounds=0
  )
  assert merged == globals_
  assert thetas == theta


def test_overlap_of_one_step():
  """tau = 1: the delta is taken after steps 2, 5, 8, ...; scans of one step.

  With P=6 fragments and H=6 a round is due after every step. Of the fragments,
  those of rounds 1 and 4 (steps 2 and 5) hold the two scalars; what is handed
  over at the end of a step is adopted at the end of the next.
  """
  merged, thetas = _trajectory(6, (1, 4), 0.0, latency=0.25)
  assert merged == [[-7, 1], [-7, -19], [-27, -19], [-27, -39]]
  assert thetas == [-47, -45]
