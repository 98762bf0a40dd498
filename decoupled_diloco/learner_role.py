"""A learner of a run, put together from its options."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from decoupled_diloco import building, data, stopping, tasks
from decoupled_diloco.observe.tape import TapeHeader, TapeWriter
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol.learner_state import LearnerOptions
from decoupled_diloco.protocol.machine import OnStep
from decoupled_diloco.run_folder import RunFolder
from decoupled_diloco.run_options import RunOptions
from decoupled_diloco.runtime.layout import layout_digest
from decoupled_diloco.runtime.learner_loop import LearnerLoop
from decoupled_diloco.runtime.learner_snapshots import LearnerSnapshots
from decoupled_diloco.runtime.local_model import LocalModel
from decoupled_diloco.training import inner
from decoupled_diloco.training.mesh import make_mesh
from decoupled_diloco.training.step import TrainScan, make_train_scan
from decoupled_diloco.training.wire_format import wire_format
from decoupled_diloco.transport.grpc_link import GrpcLink


@dataclasses.dataclass(frozen=True)
class LearnerSetup:
  """A learner put together, before it looks for its syncer.

  Attributes:
    open_batches: the batches of the scans from a step of this learner on, a
      `data.Prefetcher`.
    example: the batches of one scan, to compile for.
  """

  options: RunOptions
  task: tasks.Task
  plan: FragmentPlan
  trainer: TrainScan
  machine_options: LearnerOptions
  open_batches: Callable[[int], data.Prefetcher[Any]]
  example: Any

  def loop(self, record: OnStep, tell: Callable[[str], None]) -> LearnerLoop:
    """A loop that can take part in a run once."""
    options = self.options
    one_batch = jax.tree.map(lambda leaf: leaf[0], self.example)
    transport = dataclasses.replace(
      options.transport,
      # In the drain, every fragment is handed over at once.
      link_queue=max(options.transport.link_queue, self.plan.num_fragments),
    )
    layout = layout_digest(self.plan, options.schedule, options.wire)
    return LearnerLoop(
      self.machine_options,
      layout=layout,
      model=LocalModel(
        self.plan,
        self.trainer,
        wire=wire_format(options.wire),
        options=options.adopt,
      ),
      link=GrpcLink(options.syncer.address, transport, options.security),
      open_batches=self.open_batches,
      tokens_per_step=self.task.num_tokens(one_batch),
      rng=jax.random.fold_in(jax.random.key(options.seed), 1 + options.learner),
      heartbeat_seconds=options.membership.heartbeat_seconds,
      connect_seconds=options.syncer.connect_seconds,
      throttle=options.throttle,
      snapshots=_snapshots(options, layout, tell),
      record=record,
      tell=tell,
      clock=building.clock(),
    )


def _snapshots(
  options: RunOptions, layout: str, tell: Callable[[str], None]
) -> LearnerSnapshots:
  """The learner's snapshots, begun anew unless the run is continued."""
  folder = RunFolder(options.workdir)
  snapshots = LearnerSnapshots(
    folder.learner_snapshots(options.learner),
    peers=[
      folder.learner_snapshots(m)
      for m in range(options.membership.num_learners)
      if m != options.learner
    ],
    layout=layout,
    options=options.snapshots,
    tell=tell,
  )
  if not options.resume:
    # They are of another run, or of a life that shall not be continued.
    snapshots.set_aside()
  return snapshots


def set_up_learner(options: RunOptions) -> LearnerSetup:
  """Everything that a learner needs before it meets the syncer.

  Raises:
    ValueError: if the options do not fit the devices, the model or the data.
  """
  options = building.fitted_to_data(options)
  task = building.build_task(options)
  plan = building.build_plan(options, task)
  steps = options.schedule.steps_per_scan
  trainer = make_train_scan(
    task,
    inner.inner_optimizer(options.inner),
    make_mesh(options.mesh),
    steps_per_scan=steps,
    learning_rate=lambda step, rejoin: inner.learning_rate(
      options.inner, step, rejoin
    ),
  )
  pipeline = building.open_pipeline(options)

  def open_batches(position: int) -> data.Prefetcher[Any]:
    iterator = data.IndexedIterator(pipeline, scan_steps=steps)
    iterator.position = position
    return data.Prefetcher(iterator, place=trainer.place)

  return LearnerSetup(
    options=options,
    task=task,
    plan=plan,
    trainer=trainer,
    machine_options=LearnerOptions(
      learner=options.learner,
      schedule=options.schedule,
      max_rounds_in_flight=options.lead.max_rounds_in_flight,
      on_lead_limit=options.lead.on_lead_limit,
      keeps_progress=options.adopt.rule == 'rebase',
    ),
    open_batches=open_batches,
    example=pipeline.scan_batches(0, steps),
  )


class End(NamedTuple):
  """How a learner has ended.

  Attributes:
    finish: what its machine says.
    stopped_by: number of the signal that was received; 0 if none was.
  """

  finish: fx.Finish
  stopped_by: int


def run_learner(setup: LearnerSetup, tell: Callable[[str], None]) -> End:
  """Takes part in a run as one learner, until it ends.

  Raises:
    SyncerUnreachableError: if there is no syncer.
    OSError: if its tape cannot be written.
    FloatingPointError: if the inner optimizer diverges.
  """
  options = setup.options
  used, there = options.mesh.num_devices, jax.local_device_count()
  if used < there:
    tell(
      f'uses {used} of {there} devices; config.mesh.data, fsdp and tensor say '
      'how many'
    )
  path = RunFolder(options.workdir).learner_tape(options.learner)
  header = TapeHeader.of('learner', setup.machine_options, setup.plan.sizes)
  with contextlib.closing(TapeWriter(path, header)) as tape:
    loop = setup.loop(tape.record, tell)
    stopped_by: list[int] = []

    def stop(number: int) -> None:
      stopped_by.append(number)
      loop.request_stop(stopping.reason(number))

    stopping.in_order(stop)
    finish = loop.run(setup.example)
  return End(finish, stopped_by[0] if stopped_by else 0)
