"""Synchronous data parallelism over many processes: what to compare with.

All processes form one JAX program (`jax.distributed`). Every step averages the
gradients of all of them exactly, so that there is one training state, of which
each process holds a copy; if one of them is not there, none can take a step.
"""

import jax
from jax._src import distributed  # For `compile_step`.
from orbax.checkpoint import multihost

from decoupled_diloco.ops.array_types import ShapeTree
from decoupled_diloco.tasks import Task
from decoupled_diloco.training import inner
from decoupled_diloco.training.mesh import MeshOptions, make_mesh
from decoupled_diloco.training.step import TrainScan, make_train_scan


def connect(
  coordinator: str,
  num_processes: int,
  process: int,
  *,
  timeout_seconds: float,
  heartbeat_seconds: float,
) -> None:
  """Makes this process part of a program of several; before any computation.

  On CPUs the collectives are Gloo's.

  Args:
    coordinator: 'host:port', where process 0 listens.
    num_processes: how many there are.
    process: which one this is.
    timeout_seconds: how long to wait for the others.
    heartbeat_seconds: after so much silence of one all others end.

  Raises:
    RuntimeError: if the others do not come.
  """
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  # It takes SIGTERM for itself: workers would outlive whoever started them.
  jax.config.update('jax_enable_preemption_service', False)
  jax.distributed.initialize(
    coordinator,
    num_processes,
    process,
    initialization_timeout=max(round(timeout_seconds), 1),
    heartbeat_timeout_seconds=max(round(heartbeat_seconds), 1),
  )


def data_parallel(task: Task, options: inner.InnerOptions) -> TrainScan:
  """The step of data parallelism over all devices of all processes.

  It is the very scan of a learner, of one step, on a mesh that copies the
  parameters to every device. A process hands in its own part of each batch
  (`TrainScan.place`).

  Raises:
    ValueError: if the batch does not fit the devices.
  """
  return make_train_scan(
    task,
    inner.inner_optimizer(options),
    make_mesh(MeshOptions(data=jax.device_count())),
    steps_per_scan=1,
    learning_rate=lambda step, rejoin: inner.learning_rate(
      options, step, rejoin
    ),
  )


def compile_step(trainer: TrainScan, batches: ShapeTree) -> None:
  """Compiles the step, or takes it from JAX's cache of compiled code.

  JAX has only the first of several processes write to that cache, lest all
  write the same. But on CPUs the key depends on the process, so that the others
  would never find anything there: they would compile at each start, while the
  first one waits for them.

  Args:
    trainer: from `data_parallel`.
    batches: see `TrainScan.compile`.
  """
  state = distributed.global_state
  own, state.process_id = state.process_id, 0
  try:
    trainer.compile(batches)
  finally:
    state.process_id = own


def wait_for_all(num_processes: int, timeout_seconds: float) -> None:
  """Waits until all processes have come here; a process can do so once.

  Gloo gives the others 30 s from the first one's first step on, too little if
  they have to compile it.

  Raises:
    RuntimeError: if they do not come.
  """
  multihost.sync_global_processes(
    'decoupled_diloco',
    timeout=max(round(timeout_seconds), 1),
    processes=set(range(num_processes)),
  )
