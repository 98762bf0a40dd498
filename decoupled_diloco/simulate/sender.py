"""The sending side of a learner, as `runtime.hand_over_sender` without threads.

What is sent while there is no connection is dropped, and what was sent last of
every fragment is kept, to be sent again.
"""

from collections.abc import Callable

from decoupled_diloco.protocol.events import PayloadFacts
from decoupled_diloco.protocol.messages import Contribution, Message
from decoupled_diloco.simulate.connection import Connection
from decoupled_diloco.simulate.syncer_shell import SyncerShell
from decoupled_diloco.simulate.work import Payload


class Sender:
  """Sends a learner's messages.

  Args:
    syncer: to whom.
    on_dropped: told of contributions that will not arrive.

  Attributes:
    connection: the way there; None while there is none.
  """

  def __init__(
    self, syncer: SyncerShell, on_dropped: Callable[[Contribution], None]
  ):
    self.connection: Connection | None = None
    self._syncer = syncer
    self._on_dropped = on_dropped
    # By fragment: the round and its payload.
    self._payloads: dict[int, tuple[int, Payload]] = {}

  def clear(self) -> None:
    """Forgets everything, the connection as well."""
    self.connection = None
    self._payloads.clear()

  def send(self, message: Message) -> None:
    """Sends a message without payload."""
    connection = self.connection
    if connection is not None:
      connection.up.send(lambda: self._syncer.hear(connection, message))

  def put(self, contribution: Contribution, payload: Payload) -> None:
    """Sends a hand-over, and keeps it."""
    self._payloads[contribution.fragment] = contribution.round, payload
    self._send(contribution, payload)

  def send_again(self, contribution: Contribution) -> None:
    """Sends a hand-over as it was, if it is still here."""
    round_, payload = self._payloads.get(contribution.fragment, (-1, None))
    if payload is not None and round_ == contribution.round:
      self._send(contribution, payload)
    else:
      self._on_dropped(contribution)

  def forget(self, fragment: int) -> None:
    """Lets go of the last payload of a fragment."""
    self._payloads.pop(fragment, None)

  def arrivals(
    self, contribution: Contribution, payload: Payload
  ) -> tuple[PayloadFacts, ...]:
    """What the syncer finds out about each copy that arrives: one, intact."""
    del contribution
    return (PayloadFacts(payload.num_bytes, norm=payload.norm),)

  def _send(self, contribution: Contribution, payload: Payload) -> None:
    connection = self.connection
    if connection is None:
      self._on_dropped(contribution)
      return
    arrivals = self.arrivals(contribution, payload)
    if not arrivals:
      self._on_dropped(contribution)
      return

    def arrive(is_intact: bool) -> None:
      for facts in arrivals:
        if not is_intact:
          facts = PayloadFacts(facts.num_bytes, is_intact=False, norm=None)
        self._syncer.hear(connection, contribution, facts, payload.content)

    dropped = connection.up.send_payload(
      contribution, payload.num_bytes, arrive
    )
    if dropped is not None:
      self._on_dropped(dropped)
