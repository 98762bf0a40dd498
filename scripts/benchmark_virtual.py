"""How many tokens/s a virtual cluster trains, against the bare scans.

  scripts/run python scripts/benchmark_virtual.py

In one process, pinned to one core, a cluster of M learners runs; every few
merged rounds it is held, and the same learners' scans run bare, one after the
other and in one vmapped program. So all are measured within the same seconds.
Printed are tokens per second and ratios, as medians over the windows.
"""

import os

# Before jax counts the cores.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from decoupled_diloco import tasks
from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.quorum import QuorumOptions
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.syncer_state import BudgetOptions, SyncerOptions
from decoupled_diloco.protocol.weights import StalenessOptions
from decoupled_diloco.training import inner, mesh
from decoupled_diloco.training.step import make_train_scan
from decoupled_diloco.training.wire_format import WireOptions
from decoupled_diloco.virtual import (
  LearnerSetup,
  VirtualCluster,
  VirtualSetup,
)

_BYTES = 256


def _setup(args: argparse.Namespace) -> VirtualSetup:
  M = args.learners
  task = tasks.language_model_task(
    TransformerOptions(
      vocab_size=_BYTES,
      width=args.width,
      layers=args.layers,
      heads=4,
      kv_heads=2,
      sequence_length=args.sequence,
    )
  )
  options = inner.InnerOptions()

  def batches(m: int):
    def draw(first: int, count: int):
      rng = np.random.default_rng((m, first))
      shape = (count, args.batch, args.sequence + 1)
      return {'tokens': rng.integers(0, _BYTES, shape, dtype=np.int32)}

    return draw

  return VirtualSetup(
    task=task,
    plan=fragment(jax.eval_shape(task.init, jax.random.key(0)), args.fragments),
    inner=inner.inner_optimizer(options),
    learning_rate=lambda step, rejoin: inner.learning_rate(
      options, step, rejoin
    ),
    learners=tuple(LearnerSetup(batches(m)) for m in range(M)),
    syncer=SyncerOptions(
      run_id='benchmark',
      layout='benchmark',
      schedule=ScheduleOptions(args.sync_every, args.fragments),
      membership=MembershipOptions(M),
      quorum=QuorumOptions(1),
      grace=GraceOptions(),
      staleness=StalenessOptions(),
      budget=BudgetOptions(rounds=10**6),
      max_rounds_in_flight=4,
    ),
    wire=WireOptions(up=args.codec, down=args.codec),
    learners_at_once=args.at_once,
  )


class _Bare:
  """The scans of all learners without any cluster."""

  def __init__(self, setup: VirtualSetup):
    steps = setup.syncer.schedule.steps_per_scan
    self._trainer = make_train_scan(
      setup.task,
      setup.inner,
      mesh.make_mesh(mesh.MeshOptions()),
      steps_per_scan=steps,
      learning_rate=setup.learning_rate,
    )
    self._batches = [each.batches(0, steps) for each in setup.learners]
    M = len(self._batches)
    self._states = [
      self._trainer.init_state(jax.random.key(m)) for m in range(M)
    ]
    self._stack = jax.tree.map(lambda *rows: jnp.stack(rows), *self._states)
    self._stacked = jax.tree.map(lambda *rows: np.stack(rows), *self._batches)
    self._steps = np.zeros(M, np.int32)
    with (
      jax.set_mesh(self._trainer.mesh),
      nnx.logical_axis_rules(mesh.DEFAULT_RULES),  # pyright: ignore
    ):
      self._vmapped = (
        jax.jit(jax.vmap(self._trainer.jitted_scan), donate_argnums=0)
        .lower(self._stack, self._stacked, self._steps)
        .compile()
      )

  def one_by_one(self) -> None:
    for m, batches in enumerate(self._batches):
      self._states[m], metrics = self._trainer.scan(self._states[m], batches, 0)
      float(metrics['loss'])

  def vmapped(self) -> None:
    self._stack, metrics = self._vmapped(
      self._stack, self._stacked, self._steps
    )
    np.asarray(metrics['loss'])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name, value in {
    'learners': 4,
    'width': 64,
    'layers': 2,
    'sequence': 128,
    'batch': 8,
    'sync_every': 24,
    'fragments': 6,
    'scans': 6,
    'windows': 12,
  }.items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--codec', default='int4')
  parser.add_argument('--at_once', choices=('vmap', 'one'))
  args = parser.parse_args()
  setup = _setup(args)
  cluster, bare = VirtualCluster(setup), _Bare(setup)
  plan = setup.plan
  print(
    f'{plan.num_elements:,} parameters in {plan.num_fragments} fragments, '
    f'{args.learners} learners; {args.windows} windows of {args.scans} scans '
    f'of {setup.syncer.schedule.steps_per_scan} steps each',
    flush=True,
  )

  def run_cluster() -> None:
    # All scans take the same virtual time.
    seconds = setup.syncer.schedule.steps_per_scan * 1.0
    cluster.engine.run(until=cluster.engine.now + args.scans * seconds)

  def repeated(scan):
    def run() -> None:
      for _ in range(args.scans):
        scan()

    return run

  runs = {
    'cluster': run_cluster,
    'one by one': repeated(bare.one_by_one),
    'vmapped': repeated(bare.vmapped),
  }
  # Until every fragment was merged and adopted: all is compiled.
  for _ in range(2 + 2 * plan.num_fragments // args.scans):
    run_cluster()
  bare.one_by_one()
  bare.vmapped()
  rates: dict[str, list[float]] = {name: [] for name in runs}
  for _ in range(args.windows):
    for name, run in runs.items():
      before = sum(each.figures.tokens for each in cluster.engine.learners)
      began = time.perf_counter()
      run()
      elapsed = time.perf_counter() - began
      after = sum(each.figures.tokens for each in cluster.engine.learners)
      tokens = after - before
      if name != 'cluster':
        tokens = args.scans * sum(
          cluster.work.tokens_per_scan(m) for m in range(args.learners)
        )
      rates[name].append(tokens / elapsed)
  for name, found in rates.items():
    ratios = [
      ours / alone for ours, alone in zip(rates['cluster'], found, strict=True)
    ]
    print(
      f'{name}: {statistics.median(found):,.0f} tokens/s'
      + (
        ''
        if name == 'cluster'
        else f'; the cluster reaches {statistics.median(ratios):.3f} of it'
      )
    )


if __name__ == '__main__':
  main()
