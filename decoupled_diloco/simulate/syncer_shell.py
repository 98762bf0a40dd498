"""The syncer on a virtual clock: it carries out what its machine decides.

It does what `runtime.syncer_server` does with sockets, threads and disks.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.machine import OnStep
from decoupled_diloco.protocol.syncer import syncer_machine
from decoupled_diloco.protocol.syncer_state import SyncerOptions, SyncerState
from decoupled_diloco.simulate.agenda import Agenda
from decoupled_diloco.simulate.connection import Connection
from decoupled_diloco.simulate.work import Payload, Work

# What a learner is told: of a connection, a message with the content of its
# payload (None if there is none) that is intact or not.
TellLearner: TypeAlias = Callable[[Connection, msg.Message, Any, bool], object]


class SyncerShell:
  """The syncer.

  Args:
    agenda: the clock.
    options: of the machine.
    work: what happens to arrays.
    merge_seconds: how long a merge takes.
    tell_learner: called when a message arrives at a learner.
    on_closed: called when a learner sees its connection closed, with why.
    record: is told every event with its effects, in order (the event tape).
  """

  def __init__(
    self,
    agenda: Agenda,
    options: SyncerOptions,
    work: Work,
    *,
    merge_seconds: float,
    tell_learner: TellLearner,
    on_closed: Callable[[Connection, str], object],
    record: OnStep,
  ):
    self._agenda = agenda
    self._work = work
    self._merge_seconds = merge_seconds
    self._tell_learner = tell_learner
    self._on_closed = on_closed
    self._record = record
    self._machine = syncer_machine(options)
    self.end: fx.Finish | None = None
    self.save_seconds = 0.0  # At the end of the run.
    self.is_alive = True
    self._life = 1
    self._durable: SyncerState | None = None
    self._durable_rounds: list[int] = []
    self._forget_process()

  def _forget_process(self) -> None:
    self.state = self._machine.init()
    self._routes: dict[int, Connection] = {}
    self._contents: dict[tuple[int, int], Any] = {}  # Of contributions.
    self._publications: dict[int, Payload] = {}  # By round, until published.
    self._lacking: dict[int, set[int]] = {}  # By learner: unsent fragments.
    self._wake_at = -1.0

  # What happens to it.

  def kill(self) -> None:
    """Ends its process; its connections are for the caller to break."""
    self.is_alive = False
    self._life += 1
    self._forget_process()

  def start(self) -> None:
    """Starts its process anew, with the merges that are durable."""
    self.is_alive = True
    held = self._durable.rounds if self._durable is not None else ()
    merged = tuple(number for number in self._durable_rounds if number in held)
    now = self._agenda.now
    self.tell(ev.Restarted(now, self._life, self._durable, merged))

  def _in_this_life(self, action: Callable[[], object]) -> Callable[[], None]:
    """Does something, unless the process has ended until then."""
    life = self._life

    def act() -> None:
      if self._life == life:
        action()

    return act

  def hear(
    self,
    connection: Connection,
    message: msg.Message,
    facts: ev.PayloadFacts | None = None,
    content: Any = None,
  ) -> None:
    """A message has arrived."""
    if not self.is_alive:
      return
    learner = connection.learner
    # Nobody speaks for a learner but its own connection.
    if (
      not isinstance(message, msg.Hello)
      and self._routes.get(learner) is not connection
    ):
      return
    event = ev.MessageArrived(self._agenda.now, message, facts)
    self.tell(event, connection, content)
    if self._lacking.get(learner):  # A sign of life: time to send the rest.
      self._send_values(learner)

  def lose(self, connection: Connection, reason: str) -> None:
    """A connection has broken, and the syncer notices."""
    if self._routes.get(connection.learner) is not connection:
      return
    del self._routes[connection.learner]
    if self.end is not None:
      return  # It is the learners' turn to go.
    self.tell(
      ev.ConnectionLost(
        self._agenda.now, connection.learner, connection.incarnation, reason
      )
    )

  def tell(
    self,
    event: ev.Event,
    connection: Connection | None = None,
    content: Any = None,
  ) -> tuple[fx.Effect, ...]:
    """Gives the machine an event and carries out the effects."""
    self.state, effects = self._machine.step(self.state, event)
    self._record(event, effects)
    for effect in effects:
      self._execute(effect, connection, content)
    return effects

  def _execute(
    self, effect: fx.Effect, connection: Connection | None, content: Any
  ) -> None:
    match effect:
      case fx.Accept(learner=learner, round=round_):
        self._contents[learner, round_] = content
      case fx.Discard(learner=learner, round=round_):
        del self._contents[learner, round_]
      case fx.Send(learner=learner, message=message):
        self._send(learner, message, connection)
      case fx.Broadcast(message=message, knowing=knowing):
        for learner, route in self._routes.items():
          if learner not in knowing:
            self._send_control(route, message)
      case fx.SendFragments(learner=learner, fragments=fragments):
        self._lacking.setdefault(learner, set()).update(fragments)
        self._send_values(learner)
      case fx.Merge():
        self._merge(effect)
      case fx.Publish():
        self._publish(effect)
      case fx.Disconnect(learner=learner, incarnation=incarnation):
        route = self._routes.get(learner)
        if route is not None and route.incarnation == incarnation:
          if effect.is_final:
            self._send_control(route, msg.Rejection(learner, effect.reason))
          self._close(route, effect.reason)
      case fx.WakeAt(at=at):
        self._wake_at = at
        self._agenda.at(at, self._in_this_life(lambda: self._wake(at)))
      case fx.Save():
        self._agenda.at(
          self._agenda.now + self.save_seconds,
          self._in_this_life(lambda: self.tell(ev.Saved(self._agenda.now))),
        )
      case fx.Finish():
        self.end = effect
      case fx.Notice() | fx.GraceBegan():
        pass  # They are for those who read the tape.
      case _:
        raise AssertionError(f'{effect} is no effect of a syncer.')

  def _wake(self, at: float) -> None:
    if self._wake_at == at:
      self.tell(ev.TimePassed(self._agenda.now))

  def _send(
    self, learner: int, message: msg.Message, connection: Connection | None
  ) -> None:
    match message:
      case msg.Rejection(reason=reason):
        # It goes the way that the hello came.
        assert connection is not None
        self._send_control(connection, message)
        self._close(connection, reason)
        return
      case msg.Welcome(incarnation=incarnation):
        assert connection is not None
        connection.incarnation = incarnation
        self._routes[learner] = connection
        self._lacking[learner] = set()
    route = self._routes.get(learner)
    if route is not None:
      self._send_control(route, message)

  def _send_control(self, route: Connection, message: msg.Message) -> None:
    route.down.send(lambda: self._tell_learner(route, message, None, True))

  def _close(self, connection: Connection, reason: str) -> None:
    """What was sent before still arrives; then the learner sees the end."""
    if self._routes.get(connection.learner) is connection:
      del self._routes[connection.learner]
    connection.down.finish()
    connection.down.send(lambda: self._on_closed(connection, reason))

  def _merge(self, merge: fx.Merge) -> None:
    contents = {
      share.learner: self._contents.pop((share.learner, merge.round))
      for share in merge.shares
    }

    state = self.state

    def done() -> None:
      # Only now, so that until then the version before is the newest.
      payload = self._work.merge(merge, contents)
      assert payload.norm is not None
      self._durable = state
      self._durable_rounds.append(merge.round)
      self._publications[merge.round] = payload
      self.tell(
        ev.MergeDone(
          self._agenda.now, merge.round, payload.num_bytes, payload.norm
        )
      )

    self._agenda.at(
      self._agenda.now + self._merge_seconds, self._in_this_life(done)
    )

  def _publish(self, publish: fx.Publish) -> None:
    payload = self._publications.pop(publish.round)
    publication = msg.Publication(
      publish.round,
      publish.fragment,
      publish.version,
      publish.contributors,
      self._work.form,
      merged_tokens=publish.merged_tokens,
    )
    for learner in publish.learners:
      route = self._routes.get(learner)
      if route is None:
        continue
      lacking = self._lacking.setdefault(learner, set())
      # An update is of no use to a learner that lacks the version before.
      if publish.fragment in lacking or not self._send_publication(
        route, publication, payload
      ):
        lacking.add(publish.fragment)

  def _send_publication(
    self, route: Connection, publication: msg.Publication, payload: Payload
  ) -> bool:
    if route.down.is_full:
      return False
    dropped = route.down.send_payload(
      publication,
      payload.num_bytes,
      lambda is_intact: self._tell_learner(
        route, publication, payload.content, is_intact
      ),
    )
    return dropped is None

  def _send_values(self, learner: int) -> None:
    route = self._routes.get(learner)
    if route is None:
      return
    for fragment in sorted(self._lacking[learner]):
      version = self.state.versions[fragment]
      publication = msg.Publication(
        round=self.state.version_rounds[fragment],
        fragment=fragment,
        version=version,
        contributors=(),
        form='value',
        merged_round=self.state.members[learner].merged_rounds[fragment],
        merged_tokens=self.state.merged_tokens,
      )
      payload = self._work.value(fragment, version)
      if not self._send_publication(route, publication, payload):
        return
      self._lacking[learner].discard(fragment)
