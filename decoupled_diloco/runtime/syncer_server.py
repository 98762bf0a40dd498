"""The syncer's shell: receive, let the machine decide, carry out its effects.

One thread drives the machine. Transport threads check payloads as they come
and put events into its inbox; merges run on an executor and come back as
events. Time is the injected clock's.
"""

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.rounds import Stage
from decoupled_diloco.protocol.syncer import syncer_machine
from decoupled_diloco.protocol.syncer_state import SyncerOptions, SyncerState
from decoupled_diloco.training.global_model import GlobalModel, Payload
from decoupled_diloco.transport.base import Parcel, SyncerEndpoint

Record = Callable[[ev.Event, Sequence[fx.Effect]], None]

# Events that wait for the machine. A transport thread that finds no room waits,
# and with it its learner's stream.
_INBOX_SIZE = 256
# How long a request to stop may go unnoticed.
_POLL_SECONDS = 0.25


class _Route(NamedTuple):
  """The connection on which an incarnation of a learner is reached."""

  peer: int
  incarnation: int


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


class SyncerServer:
  """Serves one run, until it is finished.

  Args:
    options: of the machine.
    model: the global parameters; this server alone changes them.
    endpoint: where learners connect; not started yet.
    executor: where merges run.
    record: is told every event with its effects, in order (the event tape).
    clock: seconds from any start.
  """

  def __init__(
    self,
    options: SyncerOptions,
    model: GlobalModel,
    endpoint: SyncerEndpoint,
    *,
    executor: Executor,
    record: Record = lambda event, effects: None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._machine = syncer_machine(options)
    self._state = self._machine.init()
    self._model = model
    self._endpoint = endpoint
    self._executor = executor
    self._record = record
    self._clock = clock
    self._inbox: queue.Queue[_Incoming | _Lost] = queue.Queue(_INBOX_SIZE)
    self._routes: dict[int, _Route] = {}
    self._learners: dict[int, int] = {}  # By peer.
    self._contributions: dict[tuple[int, int], Payload] = {}
    self._publications: dict[int, bytes] = {}  # By round, until published.
    self._lacking: dict[int, set[int]] = {}  # By learner: unsent fragments.
    self._wake_at: float | None = None
    self._failure: BaseException | None = None
    self._finish: fx.Finish | None = None
    self._stop_reason: str | None = None

  @property
  def state(self) -> SyncerState:
    """What the machine remembers."""
    return self._state

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

    Raises:
      FloatingPointError: if a merge was not finite.
    """
    while self._finish is None:
      self.serve_once(block=True)
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
    try:
      wait = _POLL_SECONDS
      if self._wake_at is not None:
        wait = min(wait, self._wake_at - now)
      incoming = self._inbox.get(block, wait)
    except queue.Empty:
      return False
    if isinstance(incoming, _Lost):
      self._lose(incoming)
    else:
      self._step(incoming)
    return True

  def close(self, drain_seconds: float) -> None:
    """Sends what is queued, for at most so long, and stops to listen."""
    self._endpoint.close(drain_seconds)

  # Called by transport threads.

  def _on_parcel(self, peer: int, parcel: Parcel) -> None:
    message, payload = parcel.message, parcel.payload
    facts = None
    if isinstance(message, msg.Contribution):
      facts = self._inspect(message, parcel)
    event = ev.MessageArrived(self._clock(), message, facts)
    self._inbox.put(_Incoming(event, payload, peer))

  def _inspect(
    self, contribution: msg.Contribution, parcel: Parcel
  ) -> ev.PayloadFacts:
    """Looks at a payload before anything is decided about it."""
    num_bytes = parcel.wire_bytes
    if not parcel.is_intact or not (
      0 <= contribution.fragment < self._model.plan.num_fragments
    ):
      return ev.PayloadFacts(num_bytes, is_intact=False, norm=None)
    try:
      norm = self._model.norm_of(contribution.fragment, parcel.payload)
    except ValueError:
      return ev.PayloadFacts(num_bytes, is_intact=False, norm=None)
    return ev.PayloadFacts(num_bytes, is_intact=True, norm=norm)

  def _on_lost(self, peer: int, reason: str) -> None:
    self._inbox.put(_Lost(self._clock(), peer, reason))

  # The thread of the machine.

  def _lose(self, lost: _Lost) -> None:
    learner = self._learners.pop(lost.peer, None)
    route = self._routes.get(learner) if learner is not None else None
    if learner is None or route is None or route.peer != lost.peer:
      return  # It was replaced or disconnected before.
    del self._routes[learner]
    self._step(
      _Incoming(
        ev.ConnectionLost(lost.now, learner, route.incarnation, lost.reason)
      )
    )

  def _step(self, incoming: _Incoming) -> None:
    event = incoming.event
    if isinstance(event, ev.MessageArrived) and not isinstance(
      event.message, msg.Hello
    ):
      route = self._routes.get(getattr(event.message, 'learner', -1))
      if route is None or route.peer != incoming.peer:
        return  # Nobody speaks for a learner but its own connection.
    try:
      self._state, effects = self._machine.step(self._state, event)
    except ValueError as error:
      # A message that only a syncer sends: the sender is no learner.
      self._endpoint.disconnect(incoming.peer, str(error))
      return
    self._record(event, effects)
    for effect in effects:
      self._execute(effect, incoming)
    if isinstance(event, ev.MessageArrived):
      self._send_lacking(event.message)

  def _execute(self, effect: fx.Effect, incoming: _Incoming) -> None:
    match effect:
      case fx.Accept(learner=learner, round=round_):
        self._contributions[learner, round_] = incoming.payload
      case fx.Discard(learner=learner, round=round_):
        del self._contributions[learner, round_]
      case fx.Send(learner=learner, message=message):
        self._send(learner, message, incoming.peer)
      case fx.Broadcast(message=message):
        for route in self._routes.values():
          self._endpoint.send(route.peer, message)
      case fx.SendFragments(learner=learner, fragments=fragments):
        self._lacking.setdefault(learner, set()).update(fragments)
        self._send_values(learner)
      case fx.Merge():
        self._merge(effect)
      case fx.Publish():
        self._publish(effect)
      case fx.Disconnect(learner=learner, incarnation=incarnation):
        route = self._routes.get(learner)
        if route and route.incarnation == incarnation:
          del self._routes[learner]
          if effect.is_final:
            self._endpoint.send(
              route.peer, msg.Rejection(learner, effect.reason)
            )
          self._endpoint.disconnect(route.peer, effect.reason)
      case fx.WakeAt(at=at):
        self._wake_at = at
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
        self._lacking[learner] = set()
        self._routes[learner] = _Route(peer, incarnation)
        self._learners[peer] = learner
    route = self._routes.get(learner)
    if route is not None:
      self._endpoint.send(route.peer, message)

  def _merge(self, merge: fx.Merge) -> None:
    contributions = {
      share.learner: self._contributions.pop((share.learner, merge.round))
      for share in merge.shares
    }

    def work() -> ev.MergeDone:
      weights = {share.learner: share.weight for share in merge.shares}
      merged = self._model.merge(merge.fragment, weights, contributions)
      self._publications[merge.round] = merged.payload
      return ev.MergeDone(
        self._clock(), merge.round, len(merged.payload), merged.norm
      )

    def done(future: Future[ev.MergeDone]) -> None:
      error = future.exception()
      if error is not None:
        self._failure = error
        self._inbox.put(_Incoming(ev.TimePassed(self._clock())))
      else:
        self._inbox.put(_Incoming(future.result()))

    self._executor.submit(work).add_done_callback(done)

  def _publish(self, publish: fx.Publish) -> None:
    payload = self._publications.pop(publish.round)
    publication = msg.Publication(
      publish.round,
      publish.fragment,
      publish.version,
      publish.contributors,
      self._model.form,
    )
    for learner in publish.learners:
      route = self._routes.get(learner)
      if route is None:
        continue
      lacking = self._lacking.setdefault(learner, set())
      # An update is of no use to a learner that lacks the version before.
      if publish.fragment in lacking or not self._endpoint.send(
        route.peer, publication, payload
      ):
        lacking.add(publish.fragment)
        self._send_values(learner)

  def _send_lacking(self, message: msg.Message) -> None:
    """A sign of life of a learner is the time to send what did not fit."""
    learner = getattr(message, 'learner', None)
    if learner is not None and self._lacking.get(learner):
      self._send_values(learner)

  def _send_values(self, learner: int) -> None:
    route = self._routes.get(learner)
    if route is None:
      return
    for fragment in sorted(self._lacking[learner]):
      if self._is_merging(fragment):
        continue  # Its values are being changed; the publication is near.
      publication = msg.Publication(
        round=self._state.version_rounds[fragment],
        fragment=fragment,
        version=self._state.versions[fragment],
        contributors=(),
        form='value',
        merged_round=self._state.members[learner].merged_rounds[fragment],
      )
      payload = self._model.value_payload(fragment)
      if not self._endpoint.send(route.peer, publication, payload):
        return
      self._lacking[learner].discard(fragment)

  def _is_merging(self, fragment: int) -> bool:
    return any(
      round_.fragment == fragment and round_.stage is Stage.MERGING
      for round_ in self._state.rounds.values()
    )
