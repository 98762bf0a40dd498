"""A learner on a virtual clock: it carries out what its machine decides.

It does what `runtime.learner_loop` does with threads, devices and sockets.
"""

from collections.abc import Callable
from typing import Any

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.learner import learner_machine
from decoupled_diloco.protocol.learner_state import (
  LearnerOptions,
  LearnerState,
  Phase,
  rejoin_step,
)
from decoupled_diloco.protocol.machine import OnStep
from decoupled_diloco.simulate.agenda import Agenda
from decoupled_diloco.simulate.connection import Connection
from decoupled_diloco.simulate.figures import Figures
from decoupled_diloco.simulate.sender import Sender
from decoupled_diloco.simulate.syncer_shell import SyncerShell
from decoupled_diloco.simulate.work import Work


class LearnerShell:
  """One learner.

  Args:
    options: of the machine.
    agenda: the clock.
    syncer: whom it talks to.
    work: what happens to arrays.
    layout: digest that the syncer compares.
    scan_seconds: draws the time of the next scan.
    connect: makes a connection to the syncer; None if there is no way.
    heartbeat_seconds: between two signs of life; infinity: none.
    snapshot_every_scans: its process comes back with the last snapshot, of
      which it makes one after so many scans; 0: with nothing but its number.
    record: is told every event with its effects.
  """

  sender_class = Sender

  def __init__(
    self,
    options: LearnerOptions,
    *,
    agenda: Agenda,
    syncer: SyncerShell,
    work: Work,
    layout: str,
    scan_seconds: Callable[[], float],
    connect: Callable[[], Connection | None],
    heartbeat_seconds: float,
    snapshot_every_scans: int,
    record: OnStep,
  ):
    self.options = options
    self.scan_seconds = scan_seconds
    self.figures = Figures()
    self.machine = learner_machine(options)
    self.state = self.machine.init()
    self.end: fx.Finish | None = None
    self.is_alive = False
    self.sender = self.sender_class(syncer, self.drop)
    self._agenda = agenda
    self._syncer = syncer
    self._work = work
    self._layout = layout
    self._connect = connect
    self._heartbeat_seconds = heartbeat_seconds
    self._snapshot_every_scans = snapshot_every_scans
    self._snapshot: LearnerState | None = None
    self._record = record
    self._life = 0
    self._forget_process()

  def _forget_process(self) -> None:
    self._life += 1
    self.sender.clear()
    self._wake_at = -1.0
    self._leave_reason = ''
    self._has_begun = False
    self._versions: dict[int, int] = {}  # Adopted before training began.
    self._handed_over: dict[int, tuple[int, float]] = {}  # By round.
    self._loss: float | None = None
    self._tokens_per_second = 0.0

  @property
  def connection(self) -> Connection | None:
    """The one that it believes in; None if there is none."""
    return self.sender.connection

  @property
  def learner(self) -> int:
    """Its number."""
    return self.options.learner

  # What happens to it.

  def start(self) -> None:
    """Starts its process anew, from its last snapshot, if there is one."""
    self.state = self.machine.init()
    self.is_alive, self.end = True, None
    self._forget_process()
    if self._snapshot is not None:
      self.tell(ev.Resumed(self._agenda.now, self._snapshot))
      self._work.resume(self.learner)
      self._has_begun = True
    self.connect()
    self.tell(ev.Compiled(self._agenda.now))

  def kill(self) -> None:
    """Ends its process; its connection is for the caller to break."""
    self.is_alive = False
    self._forget_process()
    self._work.stop(self.learner)

  def connect(self) -> None:
    """Says hello to the syncer, if there is a way to it."""
    connection = self._connect()
    self.sender.connection = connection
    if connection is None:
      return
    hello = msg.Hello(
      learner=self.learner,
      layout=self._layout,
      run_id=self.state.run_id,
      incarnation=self.state.incarnation,
      versions=self.state.versions if self.state.run_id else (),
    )
    self.sender.send(hello)
    if self._heartbeat_seconds < float('inf'):
      self._pulse(connection)

  def lose(self, connection: Connection, reason: str) -> None:
    """Its connection is broken, and it notices."""
    if self.connection is not connection:
      return
    connection.cut()
    self.sender.connection = None
    now, incarnation = self._agenda.now, self.state.incarnation
    self.tell(ev.ConnectionLost(now, self.learner, incarnation, reason))

  def leave(self, reason: str) -> None:
    """It says farewell after its scan."""
    if self.state.phase is Phase.TRAINING:
      self._leave_reason = reason
    else:
      self.tell(ev.StopRequested(self._agenda.now, reason))

  def hear(
    self,
    connection: Connection,
    message: msg.Message,
    content: Any,
    is_intact: bool,
  ) -> None:
    """A message of the syncer has arrived."""
    if self.connection is not connection:
      return
    if isinstance(message, msg.Publication):
      newest = self.state.versions[message.fragment]
      is_gap = message.form == 'update' and message.version > newest + 1
      if not is_intact or is_gap:
        self.sender.send(
          msg.Lacking(self.learner, self.state.incarnation, (message.fragment,))
        )
        return
      if message.version > newest:
        self._work.stage(self.learner, message, content)
    self.tell(ev.MessageArrived(self._agenda.now, message))

  def tell(self, event: ev.Event) -> None:
    """Gives the machine an event and carries out the effects."""
    if not self.is_alive:
      return
    self.state, effects = self.machine.step(self.state, event)
    self._record(event, effects)
    for effect in effects:
      self._execute(effect)

  # What its machine decides.

  def _execute(self, effect: fx.Effect) -> None:
    match effect:
      case fx.Send(message=message):
        self.sender.send(message)
      case fx.HandOver(contribution=contribution):
        payload = self._work.hand_over(self.learner, contribution)
        number = contribution.round
        self._handed_over[number] = self.state.total_steps, self._agenda.now
        self.sender.put(contribution, payload)
      case fx.Resend(contribution=contribution):
        self.sender.send_again(contribution)
      case fx.Adopt():
        self._adopt(effect)
      case fx.Forget(round=number, fragment=fragment):
        self._handed_over.pop(number, None)
        self._work.forget(self.learner, fragment, number)
      case fx.StartScan() if self._leave_reason:
        pass
      case fx.StartScan(global_step=global_step):
        self._scan(global_step)
      case fx.WakeAt(at=at):
        self._wake_at = at
        life = self._life
        self._agenda.at(at, lambda: self._wake(life, at))
      case fx.Finish():
        self.end = effect
        self._close()
      case fx.Wait() | fx.Notice():
        pass  # They are for people.
      case _:
        raise AssertionError(f'{effect} is no effect of a learner.')

  def _wake(self, life: int, at: float) -> None:
    if self._life == life and self._wake_at == at:
      self.tell(ev.TimePassed(self._agenda.now))

  def _adopt(self, adopt: fx.Adopt) -> None:
    p = adopt.fragment
    if self._has_begun:
      self.sender.forget(p)
      steps, at = self._handed_over.pop(adopt.merged_round, (0, -1.0))
      # In the drain it does not train meanwhile.
      if at >= 0 and self.state.drain_first is None:
        self.figures.adopted += 1
        self.figures.overlap_steps += self.state.total_steps - steps
        self.figures.overlap_seconds += self._agenda.now - at
      self._work.adopt(self.learner, adopt)
      return
    self._versions[p] = adopt.version
    if len(self._versions) < self.options.schedule.num_fragments:
      return
    versions = tuple(version for _, version in sorted(self._versions.items()))
    step = rejoin_step(self.options, self.state)
    self._work.begin(self.learner, versions, step)
    self._has_begun = True

  def _scan(self, global_step: int) -> None:
    life = self._life
    seconds = self.scan_seconds()
    steps = self.options.schedule.steps_per_scan
    tokens = self._work.tokens_per_scan(self.learner)
    every = self._snapshot_every_scans
    if every and self.figures.scans % every == 0:
      self._snapshot = self.state
      self._work.snapshot(self.learner)
    self._work.start_scan(self.learner, global_step, self.state.total_steps)

    def end() -> None:
      if self._life != life or self.end is not None:
        return
      self._loss = self._work.end_scan(self.learner)
      self._tokens_per_second = tokens / seconds
      self.figures.scans += 1
      self.figures.scan_seconds += seconds
      self.figures.tokens += tokens
      self.tell(ev.ScanEnded(self._agenda.now, steps, tokens, seconds))
      if self._leave_reason and self._life == life:
        self.tell(ev.StopRequested(self._agenda.now, self._leave_reason))

    self._agenda.at(self._agenda.now + seconds, end)

  # What it sends.

  def drop(self, contribution: msg.Contribution) -> None:
    """A hand-over will not arrive; its machine is told at once."""
    life, now = self._life, self._agenda.now
    event = ev.HandOverDropped(now, contribution.round)

    def tell() -> None:
      if self._life == life:
        self.tell(event)

    # After what is being carried out now.
    self._agenda.at(now, tell)

  def _pulse(self, connection: Connection) -> None:
    if self.connection is not connection or self.end or self._syncer.end:
      return
    state = self.state
    if state.is_connected:
      activity = str(state.phase) if state.is_compiled else 'compiling'
      self.sender.send(
        msg.Heartbeat(
          learner=self.learner,
          incarnation=state.incarnation,
          activity=activity,
          total_steps=state.total_steps,
          total_tokens=state.total_tokens,
          tokens_per_second=self._tokens_per_second,
          loss=self._loss,
          round=state.last_round,
          adopted_round=state.adopted_round,
        )
      )
    self._agenda.at(
      self._agenda.now + self._heartbeat_seconds,
      lambda: self._pulse(connection),
    )

  def _close(self) -> None:
    """Its process ends in order: what was sent arrives, what waits does not."""
    connection = self.connection
    if connection is None:
      return
    connection.up.finish()
    at = max(self._agenda.now, connection.up.free_at)
    at += connection.latency_seconds
    reason = 'the learner has closed the connection'

    def close() -> None:
      if not connection.is_broken:
        connection.cut()
        self._syncer.lose(connection, reason)

    self._agenda.at(at, close)
