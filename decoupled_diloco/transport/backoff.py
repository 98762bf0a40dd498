"""How long to wait before the next attempt."""

import random

from decoupled_diloco.transport.options import TransportOptions


class Backoff:
  """Exponential backoff with jitter, so that learners do not come in step."""

  def __init__(self, options: TransportOptions, rng: random.Random):
    self._options = options
    self._rng = rng
    self._pause = options.backoff_initial_seconds

  def next(self) -> float:
    """The next pause, in seconds."""
    pause = self._pause
    self._pause = min(2 * pause, self._options.backoff_maximum_seconds)
    return pause * (1 - self._options.backoff_jitter * self._rng.random())

  def reset(self):
    """Begins again with the shortest pause: the connection was of use."""
    self._pause = self._options.backoff_initial_seconds
