"""The two machines on a scripted clock and network, without any arrays.

A discrete-event shell: scans take the time that the test gives them, messages
take `latency` seconds each way, a merge takes `merge_seconds`. All decisions
are those of `protocol/`.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.learner import learner_machine
from decoupled_diloco.protocol.learner_state import LearnerOptions
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.quorum import QuorumOptions
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.syncer import syncer_machine
from decoupled_diloco.protocol.syncer_state import (
  BudgetOptions,
  SyncerOptions,
)
from decoupled_diloco.protocol.weights import StalenessOptions

TOKENS_PER_STEP = 100


def syncer_options(
  M: int = 2,
  k_min: int = 1,
  H: int = 6,
  P: int = 6,
  rounds: int = 10,
  **overrides,
) -> SyncerOptions:
  """Options for tests: no silence is ever too long unless a test says so."""
  options = {
    'run_id': 'run',
    'layout': 'layout',
    'schedule': ScheduleOptions(sync_every=H, num_fragments=P),
    'membership': MembershipOptions(
      num_learners=M, heartbeat_seconds=1.0, liveness_timeout_seconds=1e6
    ),
    'quorum': QuorumOptions(min_learners=k_min),
    'grace': GraceOptions(),
    'staleness': StalenessOptions(),
    'budget': BudgetOptions(rounds=rounds),
    'max_rounds_in_flight': 4,
  }
  return SyncerOptions(**(options | overrides))


@dataclasses.dataclass
class Learner:
  """One learner's machine and what happened to it."""

  options: LearnerOptions
  scan_seconds: Callable[[], float]
  machine: object = None
  state: object = None
  is_alive: bool = True
  is_partitioned: bool = False
  scans: int = 0
  scan_time: float = 0.0
  life: int = 0
  handed_over: dict[int, float] = dataclasses.field(default_factory=dict)
  adopted: list[fx.Adopt] = dataclasses.field(default_factory=list)
  overlaps: list[float] = dataclasses.field(default_factory=list)
  starts: list[int] = dataclasses.field(default_factory=list)
  end: fx.Finish | None = None


class Cluster:
  """M learners and a syncer; `run` ends when the syncer does."""

  def __init__(
    self,
    options: SyncerOptions,
    scan_seconds: list[Callable[[], float]],
    *,
    latency: float = 0.0,
    merge_seconds: float = 0.0,
    on_lead_limit: str = 'train',
    keeps_progress: bool = False,
  ):
    self.options = options
    self.latency = latency
    self.merge_seconds = merge_seconds
    self.now = 0.0
    self.end: fx.Finish | None = None
    self.tape: list[tuple[ev.Event, tuple[fx.Effect, ...]]] = []
    self._queue: list[tuple[float, int, Callable[[], None]]] = []
    self._order = itertools.count()
    self._syncer = syncer_machine(options)
    self.syncer_state = self._syncer.init()
    self.learners: list[Learner] = []
    for m, seconds in enumerate(scan_seconds):
      learner = Learner(
        LearnerOptions(
          learner=m,
          schedule=options.schedule,
          max_rounds_in_flight=options.max_rounds_in_flight,
          on_lead_limit=on_lead_limit,
          keeps_progress=keeps_progress,
        ),
        seconds,
      )
      self.learners.append(learner)
      self.start(m)

  def at(self, time: float, action: Callable[[], None]) -> None:
    """Schedules an action; actions of one time run in order of scheduling."""
    heapq.heappush(self._queue, (time, next(self._order), action))

  def run(self, until: float = 1e9) -> 'Cluster':
    """Runs until the syncer has finished, nothing is left, or time is up."""
    while self._queue and self._queue[0][0] <= until:
      self.now, _, action = heapq.heappop(self._queue)
      action()
    return self

  def start(self, m: int) -> None:
    """Starts a learner's process anew, with nothing but its number."""
    learner = self.learners[m]
    learner.machine = learner_machine(learner.options)
    learner.state = learner.machine.init()
    learner.is_alive, learner.end = True, None
    learner.life += 1
    learner.handed_over = {}
    self._to_syncer(m, msg.Hello(learner=m, layout=self.options.layout))
    self._tell_learner(m, ev.Compiled(self.now))

  def kill(self, m: int) -> None:
    """Ends a learner's process; the syncer sees the connection break."""
    learner = self.learners[m]
    learner.is_alive = False
    lost = ev.ConnectionLost(self.now, m, learner.state.incarnation, 'killed')
    self.tell_syncer(lost)

  def partition(self, m: int) -> None:
    """Cuts a learner's link: both sides notice."""
    learner = self.learners[m]
    learner.is_partitioned = True
    incarnation = learner.state.incarnation
    self.tell_syncer(ev.ConnectionLost(self.now, m, incarnation, 'cut'))
    self._tell_learner(m, ev.ConnectionLost(self.now, m, incarnation, 'cut'))

  def heal(self, m: int) -> None:
    """Restores a learner's link; it says hello again."""
    learner = self.learners[m]
    learner.is_partitioned = False
    state = learner.state
    self._to_syncer(
      m,
      msg.Hello(
        learner=m,
        layout=self.options.layout,
        run_id=state.run_id,
        incarnation=state.incarnation,
        versions=state.versions,
      ),
    )

  # The syncer's shell.

  def tell_syncer(self, event: ev.Event) -> tuple[fx.Effect, ...]:
    """Gives the syncer an event and executes the effects."""
    self.syncer_state, effects = self._syncer.step(self.syncer_state, event)
    self.tape.append((event, effects))
    for effect in effects:
      self._execute_for_syncer(effect)
    return effects

  def _execute_for_syncer(self, effect: fx.Effect) -> None:
    match effect:
      case fx.Send(learner=m, message=message):
        self._to_learner(m, message)
      case fx.Broadcast(message=message):
        for m in self.syncer_state.connected:
          self._to_learner(m, message)
      case fx.SendFragments(learner=m, fragments=fragments):
        for p in fragments:
          self._to_learner(
            m,
            msg.Publication(
              round=self.syncer_state.version_rounds[p],
              fragment=p,
              version=self.syncer_state.versions[p],
              contributors=(),
              form='value',
              merged_round=self.syncer_state.members[m].merged_rounds[p],
            ),
          )
      case fx.Merge(round=round_):
        done = lambda: self.tell_syncer(ev.MergeDone(self.now, round_, 8, 1.0))
        self.at(self.now + self.merge_seconds, done)
      case fx.Publish():
        publication = msg.Publication(
          effect.round,
          effect.fragment,
          effect.version,
          effect.contributors,
          'update',
        )
        for m in effect.learners:
          self._to_learner(m, publication)
      case fx.WakeAt(at=at):
        self.at(at, lambda: self.tell_syncer(ev.TimePassed(self.now)))
      case fx.Finish():
        self.end = effect

  # A learner's shell.

  def _to_syncer(self, m: int, message: msg.Message) -> None:
    learner = self.learners[m]
    life = learner.life
    is_bulk = isinstance(message, msg.Contribution)
    payload = ev.PayloadFacts(8) if is_bulk else None

    def arrive():
      if learner.life == life and not learner.is_partitioned:
        self.tell_syncer(ev.MessageArrived(self.now, message, payload))

    if not learner.is_partitioned:
      self.at(self.now + self.latency, arrive)

  def _to_learner(self, m: int, message: msg.Message) -> None:
    learner = self.learners[m]
    life = learner.life

    def arrive():
      if learner.life == life and not learner.is_partitioned:
        self._tell_learner(m, ev.MessageArrived(self.now, message))

    self.at(self.now + self.latency, arrive)

  def _tell_learner(self, m: int, event: ev.Event) -> None:
    learner = self.learners[m]
    if not learner.is_alive:
      return
    learner.state, effects = learner.machine.step(learner.state, event)
    for effect in effects:
      self._execute_for_learner(m, effect)

  def _execute_for_learner(self, m: int, effect: fx.Effect) -> None:
    learner = self.learners[m]
    match effect:
      case fx.Send(message=message):
        self._to_syncer(m, message)
      case fx.HandOver(contribution=contribution):
        learner.handed_over[contribution.round] = self.now
        self._to_syncer(m, contribution)
      case fx.Resend(contribution=contribution):
        self._to_syncer(m, contribution)
      case fx.Adopt():
        learner.adopted.append(effect)
        if effect.merged_round in learner.handed_over:
          learner.overlaps.append(
            self.now - learner.handed_over[effect.merged_round]
          )
      case fx.StartScan(global_step=global_step):
        learner.starts.append(global_step)
        self._scan(m)
      case fx.Finish():
        learner.end = effect

  def _scan(self, m: int) -> None:
    learner = self.learners[m]
    life = learner.life
    seconds = learner.scan_seconds()
    steps = self.options.schedule.steps_per_scan

    def end():
      if learner.life != life or not learner.is_alive:
        return
      learner.scans += 1
      learner.scan_time += seconds
      self._tell_learner(
        m, ev.ScanEnded(self.now, steps, steps * TOKENS_PER_STEP, seconds)
      )

    self.at(self.now + seconds, end)

  # What a test asks about.

  def effects(self, kind: type) -> list:
    """The syncer's effects of one kind, in order."""
    return [
      effect
      for _, effects in self.tape
      for effect in effects
      if isinstance(effect, kind)
    ]

  def refusals(self, reason: msg.Reason) -> list[msg.Refusal]:
    """The refusals for one reason."""
    return [
      effect.message
      for effect in self.effects(fx.Send)
      if isinstance(effect.message, msg.Refusal)
      and effect.message.reason is reason
    ]

  def participation(self, m: int, before: int | None = None) -> float:
    """The share of the rounds (before the drain) in which m was merged."""
    merges = [
      merge
      for merge in self.effects(fx.Merge)
      if before is None or merge.round < before
    ]
    taken = [
      merge
      for merge in merges
      if m in {share.learner for share in merge.shares}
    ]
    return len(taken) / len(merges)
