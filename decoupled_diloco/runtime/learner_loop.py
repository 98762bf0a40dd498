"""A learner's shell: it trains, and never waits for the network.

The training thread runs scans and carries out what concerns arrays; all else
happens beside it:

* the receiver decodes publications as they come and tells the machine;
* the sender fetches what was encoded at scan boundaries and sends it;
* the pulse sends heartbeats.

All of them step one machine, `SharedMachine`.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.learner_state import (
  LearnerOptions,
  LearnerState,
  rejoin_step,
)
from decoupled_diloco.protocol.machine import OnStep
from decoupled_diloco.runtime.hand_over_sender import HandOverSender
from decoupled_diloco.runtime.learner_receiver import LearnerReceiver
from decoupled_diloco.runtime.learner_snapshots import LearnerSnapshots
from decoupled_diloco.runtime.local_model import LocalModel
from decoupled_diloco.runtime.shared_machine import SharedMachine
from decoupled_diloco.runtime.throttle import ThrottleOptions
from decoupled_diloco.training.inner import NEVER
from decoupled_diloco.transport.base import LearnerLink

# How long the last messages of a learner may take to leave.
_FAREWELL_SECONDS = 3.0
# How long a learner waits for the syncer's answer before it compiles: one that
# is refused should not have compiled for it.
_ANSWER_SECONDS = 2.0
_NO_THROTTLE = ThrottleOptions()


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
    record: OnStep = lambda event, effects: None,
    tell: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._options = options
    self._model = model
    self._link = link
    self._open_batches = open_batches
    self._tokens_per_step = tokens_per_step
    self._rng = rng
    self._heartbeat_seconds = heartbeat_seconds
    self._throttle = throttle
    self._snapshots = snapshots
    self._tell_people = tell
    self._clock = clock

    self._machine = SharedMachine(
      options, model=model, link=link, record=record
    )
    self._receiver = LearnerReceiver(
      options.learner,
      layout=layout,
      machine=self._machine,
      model=model,
      link=link,
      connect_seconds=connect_seconds,
      tell_people=tell,
      clock=clock,
    )
    self._sender = HandOverSender(model, link, self._drop)
    self._stop_reason: str | None = None
    self._loss: float | None = None
    self._tokens_per_second = 0.0
    self._versions: dict[int, int] = {}  # Adopted before training began.
    self._has_begun = False
    self._batches: Iterator[Any] | None = None

  @property
  def state(self) -> LearnerState:
    """What the machine remembers."""
    return self._machine.state

  def request_stop(self, reason: str) -> None:
    """Ends after the current scan; may be called from a signal handler."""
    self._stop_reason = reason
    self._machine.notice(reason)  # Only to wake the training thread.

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
      for target in (self._receiver.run, self._sender.run, self._pulse)
    ]
    self._resume()
    self._link.start()
    for thread in threads:
      thread.start()
    try:
      self._machine.is_answered.wait(_ANSWER_SECONDS)
      if not self._machine.is_over.is_set():
        self._model.compile(example)
        self._machine.tell(ev.Compiled(self._clock()))
      return self._train()
    finally:
      self._machine.is_over.set()
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
    self._machine.tell(ev.Resumed(self._clock(), found.state))
    self._tell_people(f'resumes from its step {found.state.total_steps:,}')

  def _train(self) -> fx.Finish:
    while True:
      effect = self._machine.next_effect()
      match effect:
        case fx.HandOver(contribution=contribution):
          captured = self._model.capture(
            contribution.fragment, contribution.round
          )
          # In the drain training is over: waiting for room costs nothing.
          is_draining = self._machine.state.drain_first is not None
          self._sender.put(contribution, captured, waits=is_draining)
        case fx.Resend(contribution=contribution):
          self._sender.send_again(contribution)
        case fx.Adopt():
          self._adopt(effect)
          self._machine.has_adopted()
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
      # Adoptions that were decided at this boundary come first: a snapshot has
      # to hold what the machine says.
      is_settled = self._machine.state_of_copy() is not None
      if self._stop_reason is not None and is_settled:
        self._take_snapshot(is_last=True)
        reason, self._stop_reason = self._stop_reason, None
        self._machine.tell(ev.StopRequested(self._clock(), reason))

  def _drop(self, contribution: msg.Contribution) -> None:
    self._machine.tell(ev.HandOverDropped(self._clock(), contribution.round))

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
    step = rejoin_step(self._options, self._machine.state)
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
      self._batches = self._open_batches(self._machine.state.total_steps)
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
    self._machine.tell(ev.ScanEnded(now, steps, tokens, now - began))

  def _take_snapshot(self, *, is_last: bool = False) -> None:
    """Between scans, if it is time for one, or there will be no other."""
    snapshots, now = self._snapshots, self._clock()
    if snapshots is None or not self._has_begun:
      return
    state = self._machine.state_of_copy()
    if state is not None and (snapshots.is_due(now) or is_last):
      snapshots.take(now, state, self._model.snapshot())

  def _keep_pace(self, until: float) -> None:
    remaining = until - self._clock()
    if remaining > 0:
      self._machine.is_over.wait(remaining)

  # Other threads.

  def _guarded(self, target: Callable[[], None]) -> None:
    """An exception on any thread ends the learner, on the training thread."""
    try:
      target()
    except BaseException as error:
      self._machine.fail(error)
      self._sender.close()  # The training thread may wait for room there.

  def _pulse(self) -> None:
    while not self._machine.is_over.wait(self._heartbeat_seconds):
      state = self._machine.settled_state()
      if state.is_connected:
        self._link.send(self._heartbeat(state))
      if self._machine.take_alarm(self._clock()):
        self._machine.tell(ev.TimePassed(self._clock()))

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
