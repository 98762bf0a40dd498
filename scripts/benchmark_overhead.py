"""How much of a learner's tokens/s synchronisation costs.

  scripts/run python scripts/benchmark_overhead.py

In one process, pinned to one core, the same compiled scan trains on the same
data in turn without a syncer (the bare scan: the limit) and as a learner of a
syncer, which runs in a process of its own on another core. Printed is the ratio
of the two rates, round by round, and its median. The config is that of the
quickstart, or --config=...; its pace is ignored: the scan runs as fast as it
can.
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
from decoupled_diloco.protocol import events as ev

_CONFIG = config_flags.DEFINE_config_file('config', 'configs/quickstart.py')
_SCANS = flags.DEFINE_integer('scans', 60, 'Scans per measurement.')
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'Measurements of either kind.')
_SERVE = flags.DEFINE_string('serve', '', 'Internal: be the syncer there.')


def _options(workdir: str, address: str) -> configuring.RunOptions:
  config = _CONFIG.value
  config.role = 'learner'
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


def _bare_seconds(setup: roles.LearnerSetup, num_scans: int) -> float:
  """Seconds per scan of the training loop alone, data included."""
  state = setup.trainer.init_state(jax.random.key(0))
  batches = setup.open_batches(0)
  try:
    for scan in range(num_scans + 1):
      if scan == 1:  # The first brings everything into the caches.
        began = time.perf_counter()
      state, metrics = setup.trainer.scan(state, next(batches), 0)
      float(metrics['loss'])
    return (time.perf_counter() - began) / num_scans
  finally:
    batches.close()


def _synced_seconds(setup: roles.LearnerSetup, num_scans: int) -> float:
  """Seconds per scan as a learner, from scan boundary to scan boundary."""
  ends: list[float] = []
  enough = threading.Event()

  def record(event: ev.Event, effects: object) -> None:
    del effects
    if isinstance(event, ev.ScanEnded):
      ends.append(time.perf_counter())
      if len(ends) > num_scans + 5:
        enough.set()

  loop = setup.loop(record=record, tell=lambda text: None)
  stopper = threading.Thread(
    target=lambda: (enough.wait(), loop.request_stop('measured'))
  )
  stopper.start()
  loop.run(setup.example)
  stopper.join()
  ends = ends[5:]  # The first rounds compile what the syncer needs.
  return (ends[-1] - ends[0]) / (len(ends) - 1)


def main(argv: list[str]) -> None:
  del argv
  entry.prepare_jax()
  if _SERVE.value:
    _serve(_SERVE.value)
    return
  with tempfile.TemporaryDirectory() as workdir, _syncer(workdir) as address:
    options = roles.with_vocabulary(_options(workdir, address))
    options = dataclasses.replace(
      options, pace=dataclasses.replace(options.pace, step_seconds=0.0)
    )
    setup = roles.set_up_learner(options)
    setup.trainer.compile(setup.example)
    steps = options.schedule.steps_per_scan
    print(f'{plan_line(setup)}; {_SCANS.value} scans of {steps} steps each')
    print('bare scan   learner   ratio of tokens/s')
    ratios = []
    for _ in range(_ROUNDS.value):
      bare = _bare_seconds(setup, _SCANS.value)
      synced = _synced_seconds(setup, _SCANS.value)
      ratios.append(bare / synced)
      print(
        f'{bare * 1e3:6.1f} ms {synced * 1e3:6.1f} ms   {ratios[-1]:.3f}',
        flush=True,
      )
    print(
      f'median ratio {statistics.median(ratios):.3f} '
      f'(lowest {min(ratios):.3f}, highest {max(ratios):.3f}): '
      f'{1 - statistics.median(ratios):.1%} lost to synchronisation'
    )


def plan_line(setup: roles.LearnerSetup) -> str:
  plan = setup.plan
  return f'{plan.num_elements:,} parameters in {plan.num_fragments} fragments'


if __name__ == '__main__':
  app.run(main)
