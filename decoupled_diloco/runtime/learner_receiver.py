"""The receiving side of a learner: what comes from the syncer, as it comes.

Publications are decoded before the machine hears of them, so that they are
ready at the next scan boundary.
"""

from collections.abc import Callable

from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.runtime.local_model import LocalModel, Staging
from decoupled_diloco.runtime.shared_machine import SharedMachine
from decoupled_diloco.transport.base import (
  LearnerLink,
  LinkDown,
  LinkUp,
  Parcel,
)

_POLL_SECONDS = 0.25


class SyncerUnreachableError(ConnectionError):
  """No syncer answered within the time for the first connection."""


class LearnerReceiver:
  """Tells the machine what comes.

  Args:
    learner: which one it is.
    layout: digest that the syncer compares.
    machine: is told.
    model: where publications are decoded.
    link: to the syncer.
    connect_seconds: how long the first connection may take.
    tell_people: is given sentences.
    clock: seconds from any start.
  """

  def __init__(
    self,
    learner: int,
    *,
    layout: str,
    machine: SharedMachine,
    model: LocalModel,
    link: LearnerLink,
    connect_seconds: float,
    tell_people: Callable[[str], None],
    clock: Callable[[], float],
  ):
    self._learner = learner
    self._layout = layout
    self._machine = machine
    self._model = model
    self._link = link
    self._connect_seconds = connect_seconds
    self._tell_people = tell_people
    self._clock = clock

  def run(self) -> None:
    """Receives until the run is over; the body of the receiving thread.

    Raises:
      SyncerUnreachableError: if there is no syncer.
      ValueError: if a publication cannot be decoded.
    """
    began = self._clock()
    was_connected = False
    while not self._machine.is_over.is_set():
      event = self._link.receive(_POLL_SECONDS)
      match event:
        case LinkUp():
          was_connected = True
          self._say_hello()
        case LinkDown(reason=reason):
          if was_connected:
            self._tell_people(f'lost the syncer ({reason}); trains on')
          lost = ev.ConnectionLost(
            self._clock(),
            self._learner,
            self._machine.state.incarnation,
            reason,
          )
          self._machine.tell(lost)
        case Parcel():
          self._take_parcel(event)
      waited = self._clock() - began
      if not was_connected and waited > self._connect_seconds:
        raise SyncerUnreachableError(
          f'no syncer has answered for {waited:.0f} s; start it first, or '
          'correct syncer.address (or raise syncer.connect_seconds).'
        )

  def _say_hello(self) -> None:
    state = self._machine.settled_state()
    hello = msg.Hello(
      learner=self._learner,
      layout=self._layout,
      run_id=state.run_id,
      incarnation=state.incarnation,
      versions=state.versions,
    )
    self._link.send(hello)

  def _take_parcel(self, parcel: Parcel) -> None:
    message = parcel.message
    if isinstance(message, msg.Publication) and not self._stage(
      message, parcel
    ):
      return
    self._machine.tell(ev.MessageArrived(self._clock(), message))
    if isinstance(message, msg.Publication):
      # The machine knows of this version now, and will adopt no older one.
      self._model.drop_older(message.fragment, message.version)

  def _stage(self, publication: msg.Publication, parcel: Parcel) -> bool:
    """Decodes a publication; asks for its value if that cannot be done."""
    staging = Staging.GAP
    if parcel.is_intact:
      staging = self._model.stage(
        publication.fragment,
        publication.version,
        publication.form,
        parcel.payload,
      )
    if staging is Staging.GAP:
      self._link.send(
        msg.Lacking(
          self._learner,
          self._machine.state.incarnation,
          (publication.fragment,),
        )
      )
    return staging is not Staging.GAP
