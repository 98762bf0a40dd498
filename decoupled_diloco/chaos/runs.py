"""The run that the experiments disturb."""

from typing import Any


def make_paced(run: Any, *, num_learners: int, step_seconds: float) -> None:
  """Makes a config that of a small byte transformer on paced learners.

  Its 0.115M parameters take a step of 16 ms on a core; with 24 fragments and
  H=24, a scan is one step.

  Args:
    run: the config of a run.
    num_learners: M.
    step_seconds: what an inner step is stretched to.
  """
  run.membership.num_learners = num_learners
  run.throttle.step_seconds = step_seconds
  run.schedule.sync_every = 24
  run.schedule.num_fragments = 24
  # What suits this H and a run of some hundred steps.
  run.outer.gain = 2.0
  run.outer.momentum = 0.7
  run.model.width = 64
  run.model.layers = 2
  run.model.heads = 4
  run.model.kv_heads = 2
  run.data.source = 'plays'
  run.data.sequence_length = 128
  run.data.batch_size = 4
  run.inner.learning_rate = 8e-3
