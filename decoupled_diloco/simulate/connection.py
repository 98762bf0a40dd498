"""One connection between a learner and the syncer, as it seems to both."""

import collections
import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from decoupled_diloco.simulate.agenda import Agenda
from decoupled_diloco.simulate.options import LinkOptions

# Told at a payload's arrival whether it is intact.
Deliver = Callable[[bool], object]


class _Waiting(NamedTuple):
  """A payload that waits to be sent."""

  item: Any
  num_bytes: int
  is_intact: bool
  deliver: Deliver


class Pipe:
  """One direction: messages without payload overtake those with one.

  Args:
    agenda: the clock.
    options: latency, rate, loss.
    max_waiting: payloads that wait to be sent, at most.
    random_loss: where losses are drawn.
  """

  def __init__(
    self,
    agenda: Agenda,
    options: LinkOptions,
    max_waiting: int,
    random_loss: random.Random,
  ):
    self._agenda = agenda
    self._options = options
    self._max_waiting = max_waiting
    self._random = random_loss
    self._waiting: collections.deque[_Waiting] = collections.deque()
    self._is_sending = False
    self._is_closed = False
    self.free_at = 0.0  # When the payload that is being sent has left.

  @property
  def is_full(self) -> bool:
    """Whether no further payload may wait."""
    return len(self._waiting) >= self._max_waiting

  def send(self, deliver: Callable[[], object]) -> None:
    """Sends a message without payload."""

    def arrive():
      if not self._is_closed:
        deliver()

    self._agenda.at(self._agenda.now + self._options.latency_seconds, arrive)

  def send_payload(self, item: Any, num_bytes: int, deliver: Deliver) -> Any:
    """Sends a message with a payload.

    Args:
      item: what it is.
      num_bytes: size of the payload.
      deliver: called at its arrival.

    Returns:
      The item that is not sent because of this one, or itself; or None.
    """
    options = self._options
    is_lost = options.loss > 0 and self._random.random() < options.loss
    if is_lost and options.on_loss == 'dropped':
      return item
    dropped = None
    if self.is_full:
      dropped = self._waiting.popleft().item
    self._waiting.append(_Waiting(item, num_bytes, not is_lost, deliver))
    if not self._is_sending:
      self._send_next()
    return dropped

  def _send_next(self) -> None:
    agenda, options = self._agenda, self._options
    rate = options.bytes_per_second
    while self._waiting and not self._is_closed:
      sent = self._waiting.popleft()
      self.free_at = agenda.now + (sent.num_bytes / rate if rate else 0.0)

      def arrive(sent: _Waiting = sent) -> None:
        if not self._is_closed:
          sent.deliver(sent.is_intact)

      agenda.at(self.free_at + options.latency_seconds, arrive)
      if rate:
        self._is_sending = True
        agenda.at(self.free_at, self._finish_sending)
        return

  def _finish_sending(self) -> None:
    self._is_sending = False
    self._send_next()

  def finish(self) -> None:
    """Sends no payload any more but the one that is being sent."""
    self._waiting.clear()

  def close(self) -> None:
    """Whatever is on its way is lost."""
    self._is_closed = True
    self._waiting.clear()


class Connection:
  """Both directions of a connection.

  Attributes:
    learner: whose it is.
    incarnation: as whom the syncer has welcomed it; 0 before that.
    is_broken: nothing passes any more, whether it was noticed or not.
  """

  def __init__(
    self,
    agenda: Agenda,
    learner: int,
    options: LinkOptions,
    num_fragments: int,
    random_loss: random.Random,
  ):
    self.learner = learner
    self.incarnation = 0
    self.is_broken = False
    self.latency_seconds = options.latency_seconds
    up_queue = max(options.up_queue, num_fragments)
    self.up = Pipe(agenda, options, up_queue, random_loss)
    down_queue = max(options.down_queue, num_fragments)
    down = dataclasses.replace(options, latency_seconds=options.down_seconds)
    self.down = Pipe(agenda, down, down_queue, random_loss)

  def cut(self) -> None:
    """Whatever is on its way is lost; nobody is told by this."""
    self.is_broken = True
    self.up.close()
    self.down.close()
