"""When the synchronous baseline takes checkpoints: as often as is best."""

import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from decoupled_diloco.chaos import checkpoint_file


def young_interval(cost_seconds: float, failure_seconds: float) -> float:
  """The best time between checkpoints, to first order; 0 while none was taken.

  `sqrt(2 * cost * mean time between failures)` (Young, A first order
  approximation to the optimum checkpoint interval, CACM 17(9), 1974; refined
  by Daly, FGCS 22(3), 2006).

  Args:
    cost_seconds: of one checkpoint.
    failure_seconds: mean time between failures that end the job.
  """
  return (2.0 * cost_seconds * failure_seconds) ** 0.5


class BackgroundCheckpoints:
  """Takes checkpoints while training goes on.

  What the rule is given as their cost is the time until one is durable: more
  than training is held up by.

  Args:
    folder: of the checkpoints.
    every_seconds: between two; 0: by Young's rule, with the cost of the last.
    failure_seconds: mean time between failures that end the job.
    report: is given what each one was: its step, what it cost, and the time
      that is then left until the next, in seconds.
    clock: seconds from any start.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    every_seconds: float,
    failure_seconds: float,
    report: Callable[[int, float, float], None],
    clock: Callable[[], float] = time.monotonic,
  ):
    self._folder = folder
    self._every_seconds = every_seconds
    self._failure_seconds = failure_seconds
    self._report = report
    self._clock = clock
    self._writer: threading.Thread | None = None
    self._error: OSError | None = None
    self._cost_seconds = 0.0
    self._last_at = clock()

  def poll(self, step: int, state: Any) -> None:
    """Begins one if it is time and none is being written.

    Args:
      step: that the state has been trained to.
      state: pytree of arrays, which may be donated afterwards.

    Raises:
      OSError: if the last one could not be written.
    """
    if self._error is not None:
      raise self._error
    is_writing = self._writer is not None and self._writer.is_alive()
    if is_writing or self._clock() < self._last_at + self._interval():
      return
    began_at = self._last_at = self._clock()
    # The next step donates the arrays.
    copy = jax.tree.map(lambda leaf: np.array(leaf), state)
    self._writer = threading.Thread(
      target=self._write, args=(step, copy, began_at)
    )
    self._writer.start()

  def finish(self, step: int, state: Any) -> None:
    """Takes the last one, and waits for it.

    Raises:
      OSError: if it could not be written.
    """
    if self._writer is not None:
      self._writer.join()
    if self._error is None:
      self._write(step, jax.device_get(state), self._clock())
    if self._error is not None:
      raise self._error

  def _interval(self) -> float:
    return self._every_seconds or young_interval(
      self._cost_seconds, self._failure_seconds
    )

  def _write(self, step: int, state: Any, began_at: float) -> None:
    try:
      checkpoint_file.save(self._folder, step, state)
    except OSError as error:
      self._error = error
      return
    self._cost_seconds = self._clock() - began_at
    self._report(step, self._cost_seconds, self._interval())
