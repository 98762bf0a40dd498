"""The sending side of a learner: hand-overs leave without holding training up.

What the training thread has captured waits here, and a thread fetches it from
the device and gives it to the link. When too much waits, the oldest is let go.
"""

import collections
import threading
from collections.abc import Callable

from decoupled_diloco.protocol.messages import Contribution
from decoupled_diloco.runtime.local_model import Captured, LocalModel
from decoupled_diloco.transport.base import LearnerLink, Payload

# Hand-overs that wait to be fetched, each a fragment in the codec's size.
_MAX_WAITING = 2


class HandOverSender:
  """Sends a learner's contributions.

  Args:
    model: where payloads are fetched.
    link: to the syncer.
    on_dropped: told of contributions that will not arrive, from any thread.
  """

  def __init__(
    self,
    model: LocalModel,
    link: LearnerLink,
    on_dropped: Callable[[Contribution], None],
  ):
    self._model = model
    self._link = link
    self._on_dropped = on_dropped
    self._changed = threading.Condition()
    self._waiting: collections.deque[tuple[Contribution, Captured]] = (
      collections.deque()
    )
    self._is_closed = False
    # By fragment, for sending again: the round and its payload.
    self._payloads: dict[int, tuple[int, Payload]] = {}

  def put(
    self, contribution: Contribution, captured: Captured, *, waits: bool
  ) -> None:
    """Queues a hand-over.

    Args:
      contribution: the message.
      captured: its payload, on the device.
      waits: whether to wait for room rather than to let the oldest go.
    """
    dropped = None
    with self._changed:
      if waits:
        self._changed.wait_for(
          lambda: len(self._waiting) < _MAX_WAITING or self._is_closed
        )
      if len(self._waiting) >= _MAX_WAITING:
        dropped, _ = self._waiting.popleft()
      self._waiting.append((contribution, captured))
      self._changed.notify_all()
    if dropped is not None:
      self._on_dropped(dropped)

  def send_again(self, contribution: Contribution) -> None:
    """Sends a hand-over as it was, if it is still here."""
    round_, payload = self._payloads.get(contribution.fragment, (-1, b''))
    if round_ == contribution.round:
      self._send(contribution, payload)
    else:
      self._on_dropped(contribution)

  def forget(self, fragment: int) -> None:
    """Lets go of the last payload of a fragment."""
    self._payloads.pop(fragment, None)

  def run(self) -> None:
    """Sends until it is closed; the body of the sending thread."""
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._waiting or self._is_closed)
        if not self._waiting:
          return
        contribution, captured = self._waiting.popleft()
        self._changed.notify_all()
      payload = self._model.fetch(captured)
      self._payloads[contribution.fragment] = (contribution.round, payload)
      self._send(contribution, payload)

  def close(self) -> None:
    """Ends `run` once nothing waits, and every wait in `put`."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()

  def _send(self, contribution: Contribution, payload: Payload) -> None:
    for dropped in self._link.send(contribution, payload):
      if isinstance(dropped, Contribution):
        self._on_dropped(dropped)
