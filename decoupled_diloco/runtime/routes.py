"""On which connection each learner is reached, and who speaks on which.

A learner that connects again gets another connection, while the former one may
not have been found broken yet; so both directions are kept.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Route(NamedTuple):
  """The connection on which an incarnation of a learner is reached."""

  peer: int
  incarnation: int


class Routes:
  """The routes of all learners that have been welcomed."""

  def __init__(self):
    self._routes: dict[int, Route] = {}
    self._learners: dict[int, int] = {}  # By peer, until that is lost.

  def add(self, learner: int, peer: int, incarnation: int) -> None:
    """A learner is welcomed on this connection; any other one is replaced."""
    self._routes[learner] = Route(peer, incarnation)
    self._learners[peer] = learner

  def get(self, learner: int) -> Route | None:
    """Where a learner is reached; None if it is not."""
    return self._routes.get(learner)

  def peers(self) -> Iterator[tuple[int, int]]:
    """Learners, each with its connection."""
    for learner, route in self._routes.items():
      yield learner, route.peer

  def is_of(self, learner: int, peer: int) -> bool:
    """Whether a connection is the one of a learner."""
    route = self._routes.get(learner)
    return route is not None and route.peer == peer

  def drop(self, learner: int) -> None:
    """A learner is to be reached no more."""
    del self._routes[learner]

  def lose(self, peer: int) -> tuple[int, int] | None:
    """A connection broke, and with it the route of its learner.

    Returns:
      The learner and its incarnation; None if this was its connection no more.
    """
    learner = self._learners.pop(peer, None)
    if learner is None or not self.is_of(learner, peer):
      return None
    return learner, self._routes.pop(learner).incarnation
