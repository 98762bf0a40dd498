"""One process of the synchronous baseline; `baseline` starts and ends it.

  python -m decoupled_diloco.chaos.baseline_worker FACTS

FACTS is a JSON object, the fields of `WorkerFacts`. The process reports what it
does as lines of JSON: {"step": n} after each step, {"checkpoint": n,
"seconds": s} for each checkpoint, {"loss": x} for a held-out loss.
"""

import dataclasses
import json
import os
import pathlib
import sys
import threading
import time
from typing import Any

from decoupled_diloco.runtime.processes import REPORT_FD


@dataclasses.dataclass(frozen=True)
class WorkerFacts:
  """What a process needs to know.

  Attributes:
    config: the run's config, as a file that `given` has written.
    folder: of the checkpoints.
    process: which one it is; -1: it only measures the newest checkpoint.
    coordinator: where process 0 listens.
    checkpoint_seconds: between two checkpoints; 0: by Young's rule.
    failure_seconds: mean time between failures that end the job.
    stall_seconds: see `BaselineOptions`.
    num_steps: after which it is done.
  """

  config: str
  folder: str
  process: int
  coordinator: str = ''
  checkpoint_seconds: float = 0.0
  failure_seconds: float = 0.0
  stall_seconds: float = 10.0
  num_steps: int = 0


def main(argv: list[str]) -> int:
  """Works until it is killed, or until all steps are done."""
  facts = WorkerFacts(**json.loads(argv[1]))
  if facts.process < 0:
    _measure(facts)
  else:
    _train(facts)
  # Taking jax apart would take a second, and nothing is left to close.
  os._exit(0)


class _Checkpoints:
  """Takes checkpoints while training goes on."""

  def __init__(self, facts: WorkerFacts):
    self._facts = facts
    self._folder = pathlib.Path(facts.folder)
    self._writer: threading.Thread | None = None
    self._seconds = 0.0  # What the last one has taken.
    self._last_at = time.monotonic()

  def after(self, step: int, state: Any) -> None:
    """Takes one if it is time; or if it is the last step, and waits for it."""
    is_last = step >= self._facts.num_steps
    interval = self._facts.checkpoint_seconds or young_interval(
      self._seconds, self._facts.failure_seconds
    )
    is_writing = self._writer is not None and self._writer.is_alive()
    is_due = time.monotonic() >= self._last_at + interval and not is_writing
    if not (is_due or is_last):
      return
    if self._writer is not None:
      self._writer.join()
    import jax
    import numpy as np

    began = self._last_at = time.monotonic()
    # The next step donates the arrays.
    copy = jax.tree.map(lambda leaf: np.array(leaf), state)
    self._writer = threading.Thread(
      target=self._write, args=(step, copy, began)
    )
    self._writer.start()
    if is_last:
      self._writer.join()

  def _write(self, step: int, state: Any, began: float) -> None:
    from decoupled_diloco.chaos import checkpoint_file

    checkpoint_file.save(self._folder, step, state)
    self._seconds = time.monotonic() - began
    _report({'checkpoint': step, 'seconds': self._seconds})


def young_interval(cost_seconds: float, failure_seconds: float) -> float:
  """The best time between checkpoints, to first order; 0 while none was taken.

  `sqrt(2 * cost * mean time between failures)` (Young, A first order
  approximation to the optimum checkpoint interval, CACM 17(9), 1974; refined
  by Daly, FGCS 22(3), 2006).
  """
  return (2.0 * cost_seconds * failure_seconds) ** 0.5


def _train(facts: WorkerFacts) -> None:
  from decoupled_diloco import building, configuring, data, entry
  from decoupled_diloco.chaos import checkpoint_file, given
  from decoupled_diloco.training import baselines

  config = given.get_config(facts.config)
  config.role, config.learner = 'learner', facts.process
  options = configuring.options_of(config)
  entry.prepare_jax('learner')
  import jax

  num_processes = options.membership.num_learners
  baselines.connect(
    facts.coordinator,
    num_processes,
    facts.process,
    timeout_seconds=options.launch.start_seconds,
    heartbeat_seconds=facts.stall_seconds,
  )
  options = building.fitted_to_data(options)
  task = building.build_task(options)
  trainer = baselines.data_parallel(task, options.inner)
  iterator = data.IndexedIterator(building.open_pipeline(options), scan_steps=1)
  like = trainer.abstract_state
  found = checkpoint_file.restore(pathlib.Path(facts.folder), like)
  if found is None:
    step, state = 0, trainer.init_state(jax.random.key(options.seed))
  else:
    step, values = found
    state = jax.tree.map(
      lambda value, leaf: jax.device_put(value, leaf.sharding), values, like
    )
  iterator.position = step
  batches = data.Prefetcher(iterator, place=trainer.place)
  checkpoints = _Checkpoints(facts)
  is_first = True
  seconds = options.throttle.step_seconds
  while step < facts.num_steps:
    batch = next(batches)
    if is_first:
      trainer.compile(batch)
      is_first = False
    began = time.monotonic()
    state, metrics = trainer.scan(state, batch, step)
    float(metrics['loss'])
    time.sleep(max(began + seconds - time.monotonic(), 0.0))
    step += 1
    if facts.process == 0:
      _report({'step': step})
      checkpoints.after(step, state)


def _measure(facts: WorkerFacts) -> None:
  """Reports the held-out loss of the newest checkpoint."""
  from decoupled_diloco import building, configuring, entry
  from decoupled_diloco.chaos import checkpoint_file, given
  from decoupled_diloco.training import baselines, evaluation

  config = given.get_config(facts.config)
  entry.prepare_jax('learner')
  options = building.fitted_to_data(configuring.options_of(config))
  task = building.build_task(options)
  trainer = baselines.data_parallel(task, options.inner)
  folder = pathlib.Path(facts.folder)
  found = checkpoint_file.restore(folder, trainer.abstract_state)
  held_out = building.held_out(options)
  if found is None or held_out is None:
    return
  import jax

  count = jax.tree.leaves(held_out)[0].shape[0]
  loss = evaluation.held_out_loss(
    task,
    found[1].params,
    (jax.tree.map(lambda leaf, i=i: leaf[i], held_out) for i in range(count)),
  )
  _report({'loss': loss})


def _report(what: dict[str, Any]) -> None:
  os.write(REPORT_FD, (json.dumps(what) + '\n').encode())


if __name__ == '__main__':
  sys.exit(main(sys.argv))
