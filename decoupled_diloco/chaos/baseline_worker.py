"""One process of the synchronous baseline; `baseline` starts and ends it.

  python -m decoupled_diloco.chaos.baseline_worker FACTS

FACTS is a JSON object, the fields of `WorkerFacts`.

It reports as lines of JSON: {"start": {phase: seconds}} and then {"step": n,
"step_seconds": s} after each step, {"checkpoint": n, "seconds": s, "interval":
i} for each checkpoint, {"loss": x} for a held-out loss. At SIGTERM the first
process takes a last checkpoint.
"""

import dataclasses
import json
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from typing import Any

from decoupled_diloco.runtime.processes import REPORT_FD


@dataclasses.dataclass(frozen=True)
class WorkerFacts:
  """What a process needs to know.

  Attributes:
    config: the run's config, as a file that `given` has written.
    folder: of the checkpoints.
    process: which one it is; -1: it only measures the newest checkpoint.
    checkpoint_seconds: between two checkpoints; 0: by Young's rule.
    failure_seconds: mean time between failures that end the job.
    stall_seconds: see `BaselineOptions`.
    num_steps: after which it is done.
    coordinator: where process 0 listens.
    began_at: when this start began, in seconds of the monotonic clock, which
      is that of all processes of a machine.
  """

  config: str
  folder: str
  process: int
  checkpoint_seconds: float = 0.0
  failure_seconds: float = 0.0
  stall_seconds: float = 10.0
  num_steps: int = 0
  coordinator: str = ''
  began_at: float = 0.0


def main(argv: list[str]) -> int:
  """Works until it is killed, or until all steps are done."""
  facts = WorkerFacts(**json.loads(argv[1]))
  code = 0
  try:
    if facts.process < 0:
      _measure(facts)
    else:
      _train(facts)
  except Exception:
    traceback.print_exc()
    code = 1
  sys.stderr.flush()
  # At an ordinary exit jax would wait for the others, who may be dead.
  os._exit(code)


class _Phases:
  """How long each phase of a start takes, in seconds."""

  def __init__(self, began_at: float):
    self.seconds: dict[str, float] = {}
    self._last_at = began_at

  def done(self, name: str) -> None:
    now = time.monotonic()
    self.seconds[name] = now - self._last_at
    self._last_at = now


def _stop_event(patience_seconds: float) -> threading.Event:
  """An event that SIGTERM sets.

  The process then has so long to end by itself: it may be waiting for others,
  where no handler in Python would be called.
  """
  stop = threading.Event()

  def wait() -> None:
    signal.sigwait([signal.SIGTERM])
    stop.set()
    time.sleep(patience_seconds)
    os._exit(1)

  # Every thread that is started from now on leaves the signal to this one.
  signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
  threading.Thread(target=wait, daemon=True).start()
  return stop


def _train(facts: WorkerFacts) -> None:
  # The others hold nothing that is worth saving.
  is_first = facts.process == 0
  stop = _stop_event(facts.stall_seconds) if is_first else threading.Event()
  from decoupled_diloco import building, configuring, data, entry
  from decoupled_diloco.chaos import checkpoint_file, given
  from decoupled_diloco.chaos.checkpoint_pace import BackgroundCheckpoints
  from decoupled_diloco.training import baselines

  config = given.get_config(facts.config)
  config.role, config.learner = 'learner', facts.process
  options = configuring.options_of(config)
  entry.prepare_jax('learner')
  import jax

  num_processes = options.membership.num_learners
  options = building.fitted_to_data(options)
  pipeline = building.open_pipeline(options)
  phases = _Phases(facts.began_at)
  phases.done('load code and data')
  baselines.connect(
    facts.coordinator,
    num_processes,
    facts.process,
    timeout_seconds=options.launch.start_seconds,
    # It is the manager who watches over stalls; this is for the case that
    # there is none.
    heartbeat_seconds=3 * facts.stall_seconds,
  )
  phases.done('connect')
  task = building.build_task(options)
  trainer = baselines.data_parallel(task, options.inner)
  iterator = data.IndexedIterator(pipeline, scan_steps=1)
  like = trainer.abstract_state
  phases.done('build')
  found = checkpoint_file.restore(pathlib.Path(facts.folder), like)
  if found is None:
    step, state = 0, trainer.init_state(jax.random.key(options.seed))
  else:
    step, values = found
    state = jax.tree.map(
      lambda value, leaf: jax.device_put(value, leaf.sharding), values, like
    )
  phases.done('restore')
  iterator.position = step
  batches = data.Prefetcher(iterator, place=trainer.place)
  batch = next(batches)
  baselines.compile_step(trainer, batch)
  phases.done('compile')
  baselines.wait_for_all(num_processes, options.launch.start_seconds)
  phases.done('wait for the others')
  checkpoints = BackgroundCheckpoints(
    pathlib.Path(facts.folder),
    every_seconds=facts.checkpoint_seconds,
    failure_seconds=facts.failure_seconds,
    report=_report_checkpoint,
  )
  is_begun = False
  while step < facts.num_steps and not stop.is_set():
    began_at = time.monotonic()
    state, metrics = trainer.scan(state, batch, step)
    float(metrics['loss'])
    step += 1
    if is_first:
      # Within the time of the step, so that it holds nobody up.
      checkpoints.poll(step, state)
    rest = began_at + options.throttle.step_seconds - time.monotonic()
    time.sleep(max(rest, 0.0))
    if is_first:
      if not is_begun:
        phases.done('first step')
        _report({'start': phases.seconds})
      seconds = time.monotonic() - began_at
      _report({'step': step, 'step_seconds': seconds})
    is_begun = True
    batch = next(batches)
  if is_first:
    checkpoints.finish(step, state)


def _measure(facts: WorkerFacts) -> None:
  """Reports the held-out loss of the newest checkpoint."""
  from decoupled_diloco import building, configuring, entry, measuring
  from decoupled_diloco.chaos import checkpoint_file, given
  from decoupled_diloco.training import baselines

  config = given.get_config(facts.config)
  entry.prepare_jax('learner')
  options = building.fitted_to_data(configuring.options_of(config))
  task = building.build_task(options)
  trainer = baselines.data_parallel(task, options.inner)
  folder = pathlib.Path(facts.folder)
  found = checkpoint_file.restore(folder, trainer.abstract_state)
  held_out = building.held_out(options)
  if found is not None and held_out is not None:
    _report({'loss': measuring.loss(task, found[1].params, held_out)})


def _report_checkpoint(step: int, seconds: float, interval: float) -> None:
  _report({'checkpoint': step, 'seconds': seconds, 'interval': interval})


def _report(what: dict[str, Any]) -> None:
  os.write(REPORT_FD, (json.dumps(what) + '\n').encode())


if __name__ == '__main__':
  sys.exit(main(sys.argv))
