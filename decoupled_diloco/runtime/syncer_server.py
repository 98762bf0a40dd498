"""The syncer's shell: receive, let the machine decide, carry out its effects.

One thread drives the machine, and nothing that takes long happens on it.
Transport threads check payloads as they come and put events into its inbox;
merges, and what is saved at the end, run on executors and come back as events;
so does the encoding of fragments for learners that join. The tape is written by
a thread of its own. Time is the injected clock's.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple, TypeAlias

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.machine import OnStep
from decoupled_diloco.protocol.rounds import Stage
from decoupled_diloco.protocol.syncer import syncer_machine
from decoupled_diloco.protocol.syncer_state import SyncerOptions, SyncerState
from decoupled_diloco.runtime.event_inbox import EventInbox
from decoupled_diloco.runtime.merges import KeepMerge, Merges
from decoupled_diloco.runtime.recording import Recording
from decoupled_diloco.runtime.routes import Routes
from decoupled_diloco.runtime.value_sender import Encoded, ValueSender
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.transport.base import Parcel, Payload, SyncerEndpoint

# Events that wait for the machine before transport threads have to.
_INBOX_SIZE = 256
# How long a request to stop may go unnoticed.
_POLL_SECONDS = 0.25


class _Incoming(NamedTuple):
  """An event for the machine, the payload that belongs to it, its sender."""

  event: ev.Event
  payload: Payload = b''
  peer: int = -1


class _Lost(NamedTuple):
  """A connection broke; whose it was, the thread of the machine knows."""

  now: float
  peer: int
  reason: str


_Item: TypeAlias = _Incoming | _Lost | Encoded


class SyncerServer:
  """Serves one run, until it is finished.

  Args:
    options: of the machine.
    model: the global parameters; this server alone changes them.
    endpoint: where learners connect; not started yet.
    executor: where merges run.
    save: saves what is final; called once at the end of the run, off the thread
      of the machine, when the global parameters change no more. Learners are
      told that the run has ended only after it has returned. What it raises
      ends the run as a failure, and is kept as `save_error`.
    saver: where `save` runs; by default where merges do.
    keep_merge: makes a merge durable, off the thread of the machine, before
      anybody is told of it; see `Merges`. What it raises ends the run.
    record: is told every event with its effects, in order (the event tape); by
      `serve`, on a thread of its own.
    clock: seconds from any start.

  Attributes:
    save_error: what `save` has raised; None if nothing.
  """

  def __init__(
    self,
    options: SyncerOptions,
    model: GlobalModel,
    endpoint: SyncerEndpoint,
    *,
    executor: Executor,
    save: Callable[[], None] = lambda: None,
    saver: Executor | None = None,
    keep_merge: KeepMerge = lambda state, merge, merged: None,
    record: OnStep = lambda event, effects: None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.save_error: Exception | None = None
    self._machine = syncer_machine(options)
    self._state = self._machine.init()
    self._model = model
    self._endpoint = endpoint
    self._executor = executor
    self._save = save
    self._saver = executor if saver is None else saver
    self._record = record
    self._clock = clock
    self._inbox: EventInbox[_Item] = EventInbox(_INBOX_SIZE)
    self._merges = Merges(model, clock, keep_merge)
    self._values = ValueSender(
      self, model.value_payload, executor, self._on_result
    )
    self._routes = Routes()
    self._wake_at: float | None = None
    self._failure: BaseException | None = None
    self._finish: fx.Finish | None = None
    self._stop_reason: str | None = None
    self._is_serving = False

  @property
  def state(self) -> SyncerState:
    """What the machine remembers."""
    return self._state

  def resume(
    self, life: int, state: SyncerState | None, merged: tuple[int, ...]
  ) -> None:
    """Goes on with a run; the model is where the run was.

    Args:
      life, state, merged: as in `Restarted`.

    Raises:
      ValueError: if the run cannot go on with these options.
    """
    self._step(_Incoming(ev.Restarted(self._clock(), life, state, merged)))

  def start(self) -> str:
    """Begins to listen; returns the address, as host:port.

    Raises:
      OSError: if the address cannot be listened on.
    """
    self._endpoint.start(self._on_parcel, self._on_lost)
    return self._endpoint.address

  def request_stop(self, reason: str) -> None:
    """Lets the run drain and end; may be called from a signal handler."""
    # Nothing else: the handler may have interrupted the inbox's own lock.
    self._stop_reason = reason

  def serve(self) -> fx.Finish:
    """Runs until the machine has finished.

    Returns:
      How it ended: as a failure if what is final could not be saved.

    Raises:
      FloatingPointError: if a merge was not finite.
      OSError: if the tape cannot be written.
    """
    record = self._record
    self._is_serving = True
    try:
      with Recording(record) as recording:
        self._record = recording.put
        while self._finish is None:
          self.serve_once(block=True)
          recording.check()
    finally:
      self._record = record
      self._is_serving = False
      self._inbox.close()
    return self._finish

  def serve_once(self, *, block: bool) -> bool:
    """Takes the next event, if there is one, or the alarm, if it is due.

    Args:
      block: whether to wait for one of them, for a short time.

    Returns:
      Whether there was any.
    """
    if self._failure is not None:
      raise self._failure
    now = self._clock()
    if self._stop_reason is not None:
      reason, self._stop_reason = self._stop_reason, None
      self._step(_Incoming(ev.StopRequested(now, reason)))
      return True
    if self._wake_at is not None and now >= self._wake_at:
      self._wake_at = None
      self._step(_Incoming(ev.TimePassed(now)))
      return True
    wait = _POLL_SECONDS if block else 0.0
    if self._wake_at is not None:
      wait = min(wait, self._wake_at - now)
    match self._inbox.get(wait):
      case None:
        return False
      case _Lost() as lost:
        self._lose(lost)
      case Encoded() as encoded:
        self._values.take(encoded)
      case incoming:
        self._step(incoming)
    return True

  def close(self, drain_seconds: float) -> None:
    """Sends what is queued, for at most so long, and stops to listen."""
    if not self._is_serving:
      # Otherwise a transport thread might wait for room in it for ever.
      self._inbox.close()
    self._endpoint.close(drain_seconds)

  # Called by other threads.

  def _on_parcel(self, peer: int, parcel: Parcel) -> None:
    facts = self._merges.inspect(parcel)
    event = ev.MessageArrived(self._clock(), parcel.message, facts)
    self._inbox.put(_Incoming(event, parcel.payload, peer))

  def _on_lost(self, peer: int, reason: str) -> None:
    self._inbox.put(_Lost(self._clock(), peer, reason))

  def _on_result(self, result: ev.Event | Encoded | BaseException) -> None:
    """What an executor has made is for the machine's thread to deal with."""
    if isinstance(result, BaseException):
      self._failure = result
      result = ev.TimePassed(self._clock())  # Only to wake that thread.
    self._inbox.put_result(
      result if isinstance(result, Encoded) else _Incoming(result)
    )

  # The thread of the machine.

  def _lose(self, lost: _Lost) -> None:
    gone = self._routes.lose(lost.peer)
    if gone is None:
      return  # It was replaced or disconnected before.
    learner, incarnation = gone
    self._values.forget(learner)
    event = ev.ConnectionLost(lost.now, learner, incarnation, lost.reason)
    self._step(_Incoming(event))

  def _step(self, incoming: _Incoming) -> None:
    event = incoming.event
    if isinstance(event, ev.MessageArrived) and not isinstance(
      event.message, msg.Hello
    ):
      learner = getattr(event.message, 'learner', -1)
      if not self._routes.is_of(learner, incoming.peer):
        return  # Nobody speaks for a learner but its own connection.
    try:
      self._state, effects = self._machine.step(self._state, event)
    except ValueError as error:
      if incoming.peer < 0:
        raise
      # A message that only a syncer sends: the sender is no learner.
      self._endpoint.disconnect(incoming.peer, str(error))
      return
    self._record(event, effects)
    for effect in effects:
      self._execute(effect, incoming)
    match event:
      case ev.MessageArrived(message=message):
        # A sign of life of a learner is the time to send what did not fit.
        self._values.retry(getattr(message, 'learner', -1))
      case ev.MergeDone():
        self._values.go_on()

  def _execute(self, effect: fx.Effect, incoming: _Incoming) -> None:
    match effect:
      case fx.Accept(learner=learner, round=round_):
        self._merges.keep(learner, round_, incoming.payload)
      case fx.Discard(learner=learner, round=round_):
        self._merges.discard(learner, round_)
      case fx.Send(learner=learner, message=message):
        self._send(learner, message, incoming.peer)
      case fx.Broadcast(message=message, knowing=knowing):
        for learner, peer in self._routes.peers():
          if learner not in knowing:
            self._endpoint.send(peer, message)
      case fx.SendFragments(learner=learner, fragments=fragments):
        self._values.add(learner, fragments)
      case fx.Merge(fragment=fragment):
        pending = self._values.pending(fragment)
        work = self._merges.prepare(effect, self._state, pending)
        self._submit(self._executor, work)
      case fx.Publish():
        self._publish(effect)
      case fx.Disconnect(learner=learner, incarnation=incarnation):
        route = self._routes.get(learner)
        if route and route.incarnation == incarnation:
          self._routes.drop(learner)
          self._values.forget(learner)
          if effect.is_final:
            self._endpoint.send(
              route.peer, msg.Rejection(learner, effect.reason)
            )
          self._endpoint.disconnect(route.peer, effect.reason)
      case fx.WakeAt(at=at):
        self._wake_at = at
      case fx.Save():
        self._submit(self._saver, self._save_final)
      case fx.Finish():
        self._finish = effect
      case fx.Notice() | fx.GraceBegan():
        pass  # They are for those who read the tape.
      case _:
        raise AssertionError(f'{effect} is no effect of a syncer.')

  def _send(self, learner: int, message: msg.Message, peer: int) -> None:
    match message:
      case msg.Rejection():
        self._endpoint.send(peer, message)
        self._endpoint.disconnect(peer, message.reason)
        return
      case msg.Welcome(incarnation=incarnation):
        self._values.welcome(learner)
        self._routes.add(learner, peer, incarnation)
    route = self._routes.get(learner)
    if route is not None:
      self._endpoint.send(route.peer, message)

  def _submit(self, executor: Executor, work: Callable[[], ev.Event]) -> None:
    """Lets an executor do something; what it returns is an event."""

    def done(future: Future[ev.Event]) -> None:
      error = future.exception()
      self._on_result(future.result() if error is None else error)

    executor.submit(work).add_done_callback(done)

  def _save_final(self) -> ev.Saved:
    try:
      self._save()
    except Exception as error:
      self.save_error = error
      return ev.Saved(self._clock(), str(error) or type(error).__name__)
    return ev.Saved(self._clock())

  def _publish(self, publish: fx.Publish) -> None:
    publication, payload = self._merges.publication(publish)
    for learner in publish.learners:
      route = self._routes.get(learner)
      # An update is of no use to a learner that lacks the version before.
      if route is None or self._values.is_lacking(learner, publish.fragment):
        continue
      if not self._endpoint.send(route.peer, publication, payload):
        self._values.add(learner, (publish.fragment,), has_room=False)

  # What the sender of values needs.

  def version_of(self, fragment: int) -> int:
    """The newest published version of a fragment."""
    return self._state.versions[fragment]

  def is_merging(self, fragment: int) -> bool:
    """Whether a merge of a fragment is under way."""
    return any(
      round_.fragment == fragment and round_.stage is Stage.MERGING
      for round_ in self._state.rounds.values()
    )

  def send_value(self, learner: int, fragment: int, payload: Payload) -> bool:
    """Sends a learner the value of a fragment's newest version."""
    route = self._routes.get(learner)
    if route is None:
      return False
    publication = msg.Publication(
      round=self._state.version_rounds[fragment],
      fragment=fragment,
      version=self._state.versions[fragment],
      contributors=(),
      form='value',
      merged_round=self._state.members[learner].merged_rounds[fragment],
      merged_tokens=self._state.merged_tokens,
    )
    return self._endpoint.send(route.peer, publication, payload)
