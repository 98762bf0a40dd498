"""What happens next, on a virtual clock."""

import heapq
import itertools
import math
from collections.abc import Callable


class Agenda:
  """Actions in order of their times; those of one time as they were put in.

  So a simulation whose random numbers are seeded is the same every time.

  Attributes:
    now: the time, in seconds; it goes on when an action is taken.
  """

  def __init__(self):
    self.now = 0.0
    self._queue: list[tuple[float, int, Callable[[], object]]] = []
    self._order = itertools.count()

  def at(self, time: float, action: Callable[[], object]) -> None:
    """Puts an action in; one that is to happen never is left out."""
    if time < math.inf:
      heapq.heappush(self._queue, (time, next(self._order), action))

  def run(self, until: float = math.inf) -> None:
    """Takes all actions that are due by then, and those they put in."""
    queue = self._queue
    while queue and queue[0][0] <= until:
      self.now, _, action = heapq.heappop(queue)
      action()
