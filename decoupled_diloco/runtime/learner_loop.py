"""A learner's shell: it trains, and never waits for the network.

The training thread runs scans and carries out what concerns arrays; all else
happens beside it:

* the receiver decodes publications as they come and tells the machine;
* the sender fetches what was encoded at scan boundaries and sends it;
* the pulse sends heartbeats.

Whichever thread has an event steps the machine, under a lock. Messages among
the effects go out at once, the rest waits in order for the training thread.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.learner import learner_machine
from decoupled_diloco.protocol.learner_state import (
  LearnerOptions,
  LearnerState,
  rejoin_step,
)
from decoupled_diloco.runtime.hand_over_sender import HandOverSender
from decoupled_diloco.runtime.learner_snapshots import LearnerSnapshots
from decoupled_diloco.runtime.local_model import LocalModel, Staging
from decoupled_diloco.runtime.throttle import ThrottleOptions
from decoupled_diloco.training.inner import NEVER
from decoupled_diloco.transport.base import (
  LearnerLink,
  LinkDown,
  LinkUp,
  Parcel,
)

Record = Callable[[ev.Event, Sequence[fx.Effect]], None]

# How long the last messages of a learner may take to leave.
_FAREWELL_SECONDS = 3.0
# How long a learner waits for the syncer's answer before it compiles: one that
# is refused should not have compiled for it.
_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.25
_NO_THROTTLE = ThrottleOptions()


class SyncerUnreachableError(ConnectionError):
  """No syncer answered within the time for the first connection."""


class LearnerLoop:
  """Takes part in one run, until it ends.

  Args:
    options: of the machine.
    layout: digest that the syncer compares.
    model: the learner's arrays.
    link: to the syncer; not started yet.
    open_batches: gives the scans' batches, stacked [K, batch, ...], from a step
      of this learner on.
    tokens_per_step: tokens in one batch.
    rng: key of the learner's random stream.
    heartbeat_seconds: between two signs of life.
    connect_seconds: how long the first connection may take.
    throttle: see there.
    snapshots: where it looks for one of a former process, and keeps its own.
    record: is told every event with its effects, in order (the event tape).
    tell: is given sentences for people.
    clock: seconds from any start.
  """

  def __init__(
    self,
    options: LearnerOptions,
    *,
    layout: str,
    model: LocalModel,
    link: LearnerLink,
    open_batches: Callable[[int], Iterator[Any]],
    tokens_per_step: int,
    rng: jax.Array,
    heartbeat_seconds: float,
    connect_seconds: float,
    throttle: ThrottleOptions = _NO_THROTTLE,
    snapshots: LearnerSnapshots | None = None,
    record: Record = lambda event, effects: None,
    tell: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._options = options
    self._layout = layout
    self._model = model
    self._link = link
    self._open_batches = open_batches
    self._tokens_per_step = tokens_per_step
    self._rng = rng
    self._heartbeat_seconds = heartbeat_seconds
    self._connect_seconds = connect_seconds
    self._throttle = throttle
    self._snapshots = snapshots
    self._record = record
    self._tell_people = tell
    self._clock = clock

    self._machine = learner_machine(options)
    self._lock = threading.Lock()
    self._state = self._machine.init()  # Replaced under the lock.
    self._effects: queue.SimpleQueue[fx.Effect | BaseException] = (
      queue.SimpleQueue()
    )
    self._num_adoptions_due = 0  # Decided, and not carried out; by the lock.
    self._sender = HandOverSender(model, link, self._drop)
    self._is_over = threading.Event()
    self._is_answered = threading.Event()
    self._stop_reason: str | None = None
    self._wake_at: float | None = None
    self._loss: float | None = None
    self._tokens_per_second = 0.0
    self._versions: dict[int, int] = {}  # Adopted before training began.
    self._has_begun = False
    self._batches: Iterator[Any] | None = None

  @property
  def state(self) -> LearnerState:
    """What the machine remembers."""
    return self._state

  def request_stop(self, reason: str) -> None:
    """Ends after the current scan; may be called from a signal handler."""
    self._stop_reason = reason
    self._effects.put(fx.Notice(reason))  # Only to wake the training thread.

  def run(self, example: Any) -> fx.Finish:
    """Joins, trains until the run ends, leaves.

    Args:
      example: arrays or shapes of one scan's batches, to compile for.

    Raises:
      SyncerUnreachableError: if there is no syncer.
      FloatingPointError: if the training loss is not finite.
    """
    threads = [
      threading.Thread(target=self._guarded, args=(target,), daemon=True)
      for target in (self._receive, self._sender.run, self._pulse)
    ]
    self._resume()
    self._link.start()
    for thread in threads:
      thread.start()
    try:
      self._is_answered.wait(_ANSWER_SECONDS)
      if not self._is_over.is_set():
        self._model.compile(example)
        self._tell(ev.Compiled(self._clock()))
      return self._train()
    finally:
      self._is_over.set()
      self._sender.close()
      self._link.close(_FAREWELL_SECONDS)
      for thread in threads:
        thread.join()
      if self._snapshots is not None:
        self._snapshots.close()
      close = getattr(self._batches, 'close', None)
      if close is not None:
        close()

  # The training thread.

  def _resume(self) -> None:
    """Goes on from its own newest snapshot, if there is one."""
    if self._snapshots is None:
      return
    found = self._snapshots.restore(self._model.snapshot_like())
    if found is None:
      return
    versions = [ledger.base_version for ledger in found.state.ledgers]
    self._model.resume(found.arrays, versions)
    self._has_begun = True
    self._tell(ev.Resumed(self._clock(), found.state))
    self._tell_people(f'resumes from its step {found.state.total_steps:,}')

  def _train(self) -> fx.Finish:
    while True:
      effect = self._effects.get()
      match effect:
        case BaseException():
          raise effect
        case fx.HandOver(contribution=contribution):
          captured = self._model.capture(
            contribution.fragment, contribution.round
          )
          # In the drain training is over: waiting for room costs nothing.
          is_draining = self._state.drain_first is not None
          self._sender.put(contribution, captured, waits=is_draining)
        case fx.Resend(contribution=contribution):
          self._sender.send_again(contribution)
        case fx.Adopt():
          self._adopt(effect)
          with self._lock:
            self._num_adoptions_due -= 1
        case fx.Forget(round=round_, fragment=fragment):
          self._model.forget(fragment, round_)
        case fx.StartScan() if self._stop_reason is not None:
          pass
        case fx.StartScan(global_step=global_step):
          self._scan(global_step)
        case fx.Notice(text=text):
          self._tell_people(text)
        case fx.Wait(reason=reason):
          self._tell_people(f'waits {reason}')
        case fx.Finish():
          if effect.is_early:
            self._take_snapshot(is_last=True)
          return effect
        case _:
          raise AssertionError(f'{effect} is no effect of a learner.')
      if self._stop_reason is not None:
        self._take_snapshot(is_last=True)
        reason, self._stop_reason = self._stop_reason, None
        self._tell(ev.StopRequested(self._clock(), reason))

  def _drop(self, contribution: msg.Contribution) -> None:
    self._tell(ev.HandOverDropped(self._clock(), contribution.round))

  def _adopt(self, effect: fx.Adopt) -> None:
    if self._has_begun:
      self._sender.forget(effect.fragment)
      self._model.adopt(
        effect.fragment, effect.version, effect.merged_round, effect.is_anew
      )
      return
    self._versions[effect.fragment] = effect.version
    if len(self._versions) == self._options.schedule.num_fragments:
      self._begin()

  def _begin(self) -> None:
    """Sets out from the syncer's parameters, wherever the run is."""
    versions = [version for _, version in sorted(self._versions.items())]
    step = rejoin_step(self._options, self._state)
    self._model.begin(versions, self._rng, NEVER if step is None else step)
    self._has_begun = True
    if self._snapshots is not None and step is not None:
      peer = self._snapshots.restore_from_peer(self._model.snapshot_like())
      if peer is not None:
        self._model.take_optimizer(peer.arrays)
        self._tell_people("begins with the state of a peer's inner optimizer")

  def _scan(self, global_step: int) -> None:
    self._take_snapshot()
    if self._batches is None:
      # Where its snapshot was taken, or where merged contributions of former
      # processes end: nothing is read twice, and nothing left out.
      self._batches = self._open_batches(self._state.total_steps)
    batches = next(self._batches)
    began = self._clock()
    loss = float(self._model.train(batches, global_step)['loss'])
    if not math.isfinite(loss):
      raise FloatingPointError(
        f'The training loss is {loss} at global step {global_step}: the inner '
        'optimizer has diverged. Lower inner.learning_rate, or clip more.'
      )
    steps = self._options.schedule.steps_per_scan
    self._keep_pace(began + steps * self._throttle.step_seconds)
    now = self._clock()
    tokens = steps * self._tokens_per_step
    self._loss = loss
    self._tokens_per_second = tokens / max(now - began, 1e-9)
    self._tell(ev.ScanEnded(now, steps, tokens, now - began))

  def _take_snapshot(self, *, is_last: bool = False) -> None:
    """Between scans, if it is time for one, or there will be no other."""
    snapshots, now = self._snapshots, self._clock()
    if snapshots is None or not self._has_begun:
      return
    with self._lock:
      state = self._state
      # Otherwise the machine is ahead of the local copy.
      is_settled = self._num_adoptions_due == 0
    if is_settled and (snapshots.is_due(now) or is_last):
      snapshots.take(now, state, self._model.snapshot())

  def _keep_pace(self, until: float) -> None:
    remaining = until - self._clock()
    if remaining > 0:
      self._is_over.wait(remaining)

  # All threads.

  def _tell(self, event: ev.Event) -> None:
    """Steps the machine; sends its messages, queues the other effects."""
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
            self._is_over.set()  # Nothing that comes now matters any more.
            self._effects.put(effect)
          case _:
            self._effects.put(effect)
    if self._state.is_connected or self._is_over.is_set():
      self._is_answered.set()

  def _guarded(self, target: Callable[[], None]) -> None:
    """An exception on any thread ends the learner, on the training thread."""
    try:
      target()
    except BaseException as error:
      self._effects.put(error)
      self._is_over.set()
      self._is_answered.set()
      self._sender.close()  # The training thread may wait for room there.

  # The receiver.

  def _receive(self) -> None:
    began = self._clock()
    was_connected = False
    while not self._is_over.is_set():
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
            self._options.learner,
            self._state.incarnation,
            reason,
          )
          self._tell(lost)
        case Parcel():
          self._take_parcel(event)
      waited = self._clock() - began
      if not was_connected and waited > self._connect_seconds:
        raise SyncerUnreachableError(
          f'no syncer has answered for {waited:.0f} s; start it first, or '
          'correct syncer.address (or raise syncer.connect_seconds).'
        )

  def _say_hello(self) -> None:
    with self._lock:
      state = self._state
    hello = msg.Hello(
      learner=self._options.learner,
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
    self._tell(ev.MessageArrived(self._clock(), message))
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
          self._options.learner,
          self._state.incarnation,
          (publication.fragment,),
        )
      )
    return staging is not Staging.GAP

  # The pulse.

  def _pulse(self) -> None:
    while not self._is_over.wait(self._heartbeat_seconds):
      with self._lock:
        state = self._state
      if state.is_connected:
        self._link.send(self._heartbeat(state))
      with self._lock:
        is_due = self._wake_at is not None and self._clock() >= self._wake_at
        if is_due:
          self._wake_at = None
      if is_due:
        self._tell(ev.TimePassed(self._clock()))

  def _heartbeat(self, state: LearnerState) -> msg.Heartbeat:
    return msg.Heartbeat(
      learner=self._options.learner,
      incarnation=state.incarnation,
      activity='compiling' if not state.is_compiled else str(state.phase),
      total_steps=state.total_steps,
      total_tokens=state.total_tokens,
      tokens_per_second=self._tokens_per_second,
      loss=self._loss,
      round=state.last_round,
      adopted_round=state.adopted_round,
    )
