"""How much of a learner's tokens/s synchronisation costs.

  scripts/run python scripts/benchmark_overhead.py

In one process, pinned to one core, a learner of a syncer trains; the syncer
runs in a process of its own on another core. Every few scans the learner is
held at a scan boundary, and the same compiled scan trains on without a syncer
(the bare scan: the limit). So both are measured within the same second, and
what else the machine does meanwhile hits both alike. Printed are the seconds
per scan and the ratio of the two rates, as medians over the pairs of windows.

The model is byte-level, of width 128 with four layers, in batches of 8: scans
of four steps take 0.2 to 0.4 s. What a learner does per scan besides training
takes 2 to 4 ms where all of its threads share one core, so shorter scans lose
more:

  --width=96 --layers=3              scans of 0.12 s
  --width=64 --layers=2 --batch=4    those of the quickstart, 24 ms

All else is as in the quickstart, or --config=..., without its throttles.
"""

import os

# Before jax counts the cores.
_CORES = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {_CORES[0]})

import contextlib
import dataclasses
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import jax
from absl import app, flags
from ml_collections import config_flags

from decoupled_diloco import configuring, entry, roles

_CONFIG = config_flags.DEFINE_config_file('config', 'configs/quickstart.py')
_WIDTH = flags.DEFINE_integer('width', 128, 'Of the model.')
_LAYERS = flags.DEFINE_integer('layers', 4, 'Of the model.')
_BATCH = flags.DEFINE_integer('batch', 8, 'Sequences of 128 bytes per step.')
_SECONDS = flags.DEFINE_float('seconds', 2.0, 'Length of a window.')
_PAIRS = flags.DEFINE_integer('pairs', 20, 'Pairs of windows.')
_SERVE = flags.DEFINE_string('serve', '', 'Internal: be the syncer there.')


def _options(workdir: str, address: str) -> configuring.RunOptions:
  config = _CONFIG.value
  config.role = 'learner'
  config.model.width = _WIDTH.value
  config.model.layers = _LAYERS.value
  config.data.batch_size = _BATCH.value
  config.workdir = workdir
  config.learner = 0
  config.membership.num_learners = 1
  config.learners = {}
  config.launch.kill = ()
  config.budget.rounds = 1_000_000
  config.syncer.address = address
  return configuring.options_of(config)


def _serve(workdir: str) -> None:
  os.sched_setaffinity(0, {_CORES[-1]})
  options = _options(workdir, '127.0.0.1:0')
  evaluation = dataclasses.replace(
    options.evaluation, batches=0, sample_tokens=0
  )
  options = dataclasses.replace(options, evaluation=evaluation)
  roles.run_syncer(roles.set_up_syncer(options))


@contextlib.contextmanager
def _syncer(workdir: str):
  process = subprocess.Popen(
    [sys.executable, __file__, f'--serve={workdir}', *sys.argv[1:]],
    # Inherited otherwise, and then the syncer could not leave this core.
    preexec_fn=lambda: os.sched_setaffinity(0, {_CORES[-1]}),
  )
  try:
    address = pathlib.Path(workdir) / 'address'
    while not address.exists():
      if process.poll() is not None:
        raise SystemExit('The syncer has ended; see above.')
      time.sleep(0.05)
    yield address.read_text().strip()
  finally:
    process.send_signal(signal.SIGTERM)
    process.wait()


class _Turns:
  """Two threads take turns; each waits for its own."""

  def __init__(self):
    self._changed = threading.Condition()
    self._is_learners = False
    self.is_over = False

  def take(self, is_learner: bool) -> None:
    with self._changed:
      self._changed.wait_for(
        lambda: self._is_learners == is_learner or self.is_over
      )

  def pass_on(self) -> None:
    with self._changed:
      self._is_learners = not self._is_learners
      self._changed.notify_all()

  def end(self) -> None:
    with self._changed:
      self.is_over = True
      self._changed.notify_all()


class _Windows:
  """Batches whose reader is held after each window of scans.

  The first scan of a window brings everything into the caches again, and is
  not counted.
  """

  def __init__(self, batches, turns: _Turns, scans: int, is_learner: bool):
    self._batches = batches
    self._turns = turns
    self._scans = scans
    self._is_learner = is_learner
    self._left = 0
    self._began = 0.0
    self.seconds_per_scan: list[float] = []

  def __iter__(self):
    return self

  def __next__(self):
    if self._left == 0:
      if self._began:
        elapsed = time.perf_counter() - self._began
        self.seconds_per_scan.append(elapsed / self._scans)
        self._turns.pass_on()
      self._turns.take(self._is_learner)
      self._left = self._scans + 1
    if self._left == self._scans:
      self._began = time.perf_counter()
    self._left -= 1
    return next(self._batches)

  def close(self) -> None:
    self._batches.close()


def _train_bare(setup: roles.LearnerSetup, windows: _Windows, turns) -> None:
  """The training loop alone, data included."""
  state = setup.trainer.init_state(jax.random.key(0))
  while not turns.is_over:
    state, metrics = setup.trainer.scan(state, next(windows), 0)
    float(metrics['loss'])


def _measure(setup: roles.LearnerSetup, scans: int, pairs: int):
  """Seconds per scan, bare and as a learner, window by window."""
  turns = _Turns()
  bare = _Windows(setup.open_batches(0), turns, scans, False)
  learners: list[_Windows] = []

  def open_batches(position: int) -> _Windows:
    learners.append(_Windows(setup.open_batches(position), turns, scans, True))
    return learners[-1]

  loop = dataclasses.replace(setup, open_batches=open_batches).loop(
    record=lambda event, effects: None, tell=lambda text: None
  )

  def train_bare():
    _train_bare(setup, bare, turns)

  beside = threading.Thread(target=train_bare)

  def finish():
    while not learners or len(learners[0].seconds_per_scan) < pairs + 1:
      if not beside.is_alive():
        break
      time.sleep(0.2)
    loop.request_stop('measured')
    turns.end()

  watcher = threading.Thread(target=finish)
  beside.start()
  watcher.start()
  loop.run(setup.example)
  beside.join()
  watcher.join()
  bare.close()
  # The first windows still compile what the syncer needs.
  return [
    (alone, synced)
    for alone, synced in zip(
      bare.seconds_per_scan[1:], learners[0].seconds_per_scan[1:], strict=False
    )
  ]


def main(argv: list[str]) -> None:
  del argv
  entry.prepare_jax()
  if _SERVE.value:
    _serve(_SERVE.value)
    return
  with tempfile.TemporaryDirectory() as workdir, _syncer(workdir) as address:
    options = roles.fitted_to_data(_options(workdir, address))
    options = dataclasses.replace(
      options,
      throttle=dataclasses.replace(options.throttle, step_seconds=0.0),
    )
    setup = roles.set_up_learner(options)
    setup.trainer.compile(setup.example)
    steps = options.schedule.steps_per_scan
    scans = max(2, round(_SECONDS.value / _scan_seconds(setup)))
    print(
      f'{plan_line(setup)}; {_PAIRS.value} pairs of windows of {scans} scans '
      f'of {steps} steps',
      flush=True,
    )
    pairs = _measure(setup, scans, _PAIRS.value)
    ratios = sorted(bare / synced for bare, synced in pairs)
    bare, synced = (
      1e3 * statistics.median(column) for column in zip(*pairs, strict=True)
    )
    lower, median, upper = statistics.quantiles(ratios, n=4)
    print(
      f'bare scan {bare:.1f} ms, as a learner {synced:.1f} ms; ratio of '
      f'tokens/s {median:.3f} (quartiles {lower:.3f} and {upper:.3f}): '
      f'{1 - median:.1%} lost to synchronisation'
    )


def _scan_seconds(setup: roles.LearnerSetup) -> float:
  """Roughly, of a bare scan."""
  state = setup.trainer.init_state(jax.random.key(0))
  batches = setup.open_batches(0)
  seconds = []
  for _ in range(8):
    began = time.perf_counter()
    state, metrics = setup.trainer.scan(state, next(batches), 0)
    float(metrics['loss'])
    seconds.append(time.perf_counter() - began)
  batches.close()
  return statistics.median(seconds)


def plan_line(setup: roles.LearnerSetup) -> str:
  plan = setup.plan
  return f'{plan.num_elements:,} parameters in {plan.num_fragments} fragments'


if __name__ == '__main__':
  app.run(main)
