"""A learner's machine, which each of its threads may step.

Whichever thread has an event steps it, under a lock. Messages among the effects
go out at once; the others wait, in order, for the training thread.
"""

import queue
import threading

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol.learner import learner_machine
from decoupled_diloco.protocol.learner_state import LearnerOptions, LearnerState
from decoupled_diloco.protocol.machine import OnStep
from decoupled_diloco.runtime.local_model import LocalModel
from decoupled_diloco.transport.base import LearnerLink


class SharedMachine:
  """The machine of one learner, and what it has decided.

  Args:
    options: of the machine.
    model: the learner's arrays.
    link: where messages go.
    record: is told every event with its effects, in order (the event tape).

  Attributes:
    is_over: set once the run is, for this learner.
    is_answered: set once the syncer has answered, or the run is over.
  """

  def __init__(
    self,
    options: LearnerOptions,
    *,
    model: LocalModel,
    link: LearnerLink,
    record: OnStep,
  ):
    self.is_over = threading.Event()
    self.is_answered = threading.Event()
    self._model = model
    self._link = link
    self._record = record
    self._machine = learner_machine(options)
    self._lock = threading.Lock()
    self._state = self._machine.init()  # Replaced under the lock.
    self._effects: queue.SimpleQueue[fx.Effect | BaseException] = (
      queue.SimpleQueue()
    )
    self._num_adoptions_due = 0  # Decided, and not carried out; by the lock.
    self._wake_at: float | None = None

  @property
  def state(self) -> LearnerState:
    """What it remembers."""
    return self._state

  def settled_state(self) -> LearnerState:
    """The same, when what it has decided so far is sent or queued."""
    with self._lock:
      return self._state

  def state_of_copy(self) -> LearnerState | None:
    """The same, if the local copy is as it says; None if it lags behind."""
    with self._lock:
      return None if self._num_adoptions_due else self._state

  def tell(self, event: ev.Event) -> None:
    """Steps it; sends its messages, queues the other effects."""
    with self._lock:
      self._state, effects = self._machine.step(self._state, event)
      self._record(event, effects)
      for effect in effects:
        match effect:
          case fx.Send(message=message):
            self._link.send(message)
          case fx.WakeAt(at=at):
            self._wake_at = at
          case fx.Adopt(fragment=fragment, version=version):
            self._model.claim(fragment, version)
            self._num_adoptions_due += 1
            self._effects.put(effect)
          case fx.Finish():
            self.is_over.set()  # Nothing that comes now matters any more.
            self._effects.put(effect)
          case _:
            self._effects.put(effect)
    if self._state.is_connected or self.is_over.is_set():
      self.is_answered.set()

  def take_alarm(self, now: float) -> bool:
    """Whether it is time for what it wanted to be woken for; once."""
    with self._lock:
      is_due = self._wake_at is not None and now >= self._wake_at
      if is_due:
        self._wake_at = None
    return is_due

  # For the training thread.

  def next_effect(self) -> fx.Effect:
    """Waits for something to carry out.

    Raises:
      BaseException: what another thread has failed with.
    """
    effect = self._effects.get()
    if isinstance(effect, BaseException):
      raise effect
    return effect

  def has_adopted(self) -> None:
    """An `Adopt` was carried out."""
    with self._lock:
      self._num_adoptions_due -= 1

  def notice(self, text: str) -> None:
    """Has people told something; may be called from a signal handler."""
    self._effects.put(fx.Notice(text))

  def fail(self, error: BaseException) -> None:
    """Ends the learner, as another thread cannot go on."""
    self._effects.put(error)
    self.is_over.set()
    self.is_answered.set()
