"""Synchronous data parallelism over many processes: what to compare with.

All processes form one JAX program (`jax.distributed`). Every step averages the
gradients of all of them exactly, so that there is one training state, of which
each process holds a copy; if one of them is not there, none can take a step.
"""

import jax

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
