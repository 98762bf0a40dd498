"""Runs of a study side by side, each in a process pinned to its own core.

Two runs on two cores make more progress than one on both, and a run that has a
core to itself takes the same time whoever else runs.
"""

import concurrent.futures
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from typing import Any


def available_cores() -> list[int]:
  """The cores that this process may use."""
  return sorted(os.sched_getaffinity(0))


def run_all(
  work: Callable[[Any], Any], items: Sequence[Any], processes: int
) -> Generator[tuple[int, Any]]:
  """Yields (index, result) of every item, as they are done.

  When the iterator is closed, or work fails, what runs is ended and what waits
  is not begun.

  Args:
    work: a function of a module; called in other processes.
    items: its arguments.
    processes: how many at a time; 0 for one per core.
  """
  cores = available_cores()
  processes = min(processes or len(cores), max(len(items), 1))
  context = multiprocessing.get_context('spawn')
  numbers = context.SimpleQueue()
  for number in range(processes):
    numbers.put(cores[number % len(cores)])
  pool = concurrent.futures.ProcessPoolExecutor(
    processes, context, initializer=_pin, initargs=(numbers,)
  )
  try:
    futures = {pool.submit(work, item): i for i, item in enumerate(items)}
    for future in concurrent.futures.as_completed(futures):
      yield futures[future], future.result()
  finally:
    # Not by waiting: a run may take minutes.
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
      worker.terminate()
    for worker in workers:
      worker.join()


def _pin(numbers: Any) -> None:
  """Before jax is imported, which counts the cores."""
  os.sched_setaffinity(0, {numbers.get()})
  # The terminal sends Ctrl-C to everybody; here the parent decides.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
