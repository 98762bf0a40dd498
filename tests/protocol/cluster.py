"""The two machines on a scripted clock and network, without any arrays.

A discrete-event shell: scans take the time that the test gives them, messages
take `latency` seconds each way, a merge takes `merge_seconds`. What is on its
way is lost with its connection. All decisions are those of `protocol/`.
"""

import heapq
import itertools
from collections.abc import Callable

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.learner import learner_machine
from decoupled_diloco.protocol.learner_state import LearnerOptions
from decoupled_diloco.protocol.syncer import syncer_machine
from decoupled_diloco.protocol.syncer_state import SyncerOptions
from tests.protocol.accounts import Accounts, Tape
from tests.protocol.cluster_parts import (
  TOKENS_PER_STEP as TOKENS_PER_STEP,
)
from tests.protocol.cluster_parts import (
  Learner,
  Route,
  sound,
)
from tests.protocol.cluster_parts import (
  syncer_options as syncer_options,
)


class Cluster(Accounts):
  """M learners and a syncer; `run` ends when the syncer does.

  Args:
    options: of the syncer; the learners' follow from them.
    scan_seconds: per learner, how long its next scan takes.
    latency: seconds that a message takes, either way.
    merge_seconds: how long a merge takes.
    bulk_seconds: how much longer a message with a payload takes; others
      overtake it.
    on_lead_limit, keeps_progress: of the learners.
    heartbeats: whether learners send them.
    arrivals: a contribution arrives once for each of the payload facts that
      this gives.
  """

  def __init__(
    self,
    options: SyncerOptions,
    scan_seconds: list[Callable[[], float]],
    *,
    latency: float = 0.0,
    merge_seconds: float = 0.0,
    bulk_seconds: float = 0.0,
    on_lead_limit: str = 'train',
    keeps_progress: bool = False,
    heartbeats: bool = False,
    arrivals: Callable[[msg.Contribution], tuple[ev.PayloadFacts, ...]] = sound,
  ):
    self.options = options
    self.latency = latency
    self.merge_seconds = merge_seconds
    self.bulk_seconds = bulk_seconds
    self.heartbeats = heartbeats
    self.arrivals = arrivals
    self.now = 0.0
    self.end: fx.Finish | None = None
    self.tape: Tape = []
    self._syncer_wakes_at = 0.0
    self._routes: dict[int, Route] = {}
    self._queue: list[tuple[float, int, Callable[[], object]]] = []
    self._order = itertools.count()
    self._syncer = syncer_machine(options)
    self.syncer_state = self._syncer.init()
    self.learners: list[Learner] = []
    for m, seconds in enumerate(scan_seconds):
      learner_options = LearnerOptions(
        learner=m,
        schedule=options.schedule,
        max_rounds_in_flight=options.max_rounds_in_flight,
        on_lead_limit=on_lead_limit,
        keeps_progress=keeps_progress,
      )
      machine = learner_machine(learner_options)
      self.learners.append(
        Learner(learner_options, seconds, machine, machine.init())
      )
      self.start(m)

  def at(self, time: float, action: Callable[[], object]) -> None:
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
    learner.state = learner.machine.init()
    learner.is_alive, learner.end, learner.tape = True, None, []
    learner.life += 1
    learner.handed_over = {}
    self._connect(m)
    self._tell_learner(m, ev.Compiled(self.now))

  def kill(self, m: int) -> None:
    """Ends a learner's process; the syncer sees the connection break."""
    self.learners[m].is_alive = False
    self._break_link(m, 'killed')

  def partition(self, m: int, is_noticed: bool = True) -> None:
    """Cuts a learner's link; both sides notice, or only the learner does."""
    learner = self.learners[m]
    learner.is_partitioned = True
    self._break_link(m, 'cut', is_noticed)
    self._tell_learner(
      m, ev.ConnectionLost(self.now, m, learner.state.incarnation, 'cut')
    )

  def heal(self, m: int) -> None:
    """Restores a learner's link; it says hello again."""
    self.learners[m].is_partitioned = False
    self._connect(m)

  def _break_link(self, m: int, why: str, is_noticed: bool = True) -> None:
    learner = self.learners[m]
    route = self._routes.get(m)
    if is_noticed and route and route.link == learner.link:
      del self._routes[m]
      lost = ev.ConnectionLost(self.now, m, route.incarnation, why)
      self.tell_syncer(lost)
    learner.link += 1

  def _connect(self, m: int) -> None:
    learner = self.learners[m]
    learner.link += 1
    hello = msg.Hello(
      learner=m,
      layout=self.options.layout,
      run_id=learner.state.run_id,
      incarnation=learner.state.incarnation,
      versions=learner.state.versions if learner.state.run_id else (),
    )
    self._to_syncer(m, hello)
    if self.heartbeats:
      self._pulse(m, learner.link)

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
        if isinstance(message, msg.Welcome):
          link = self.learners[m].link
          self._routes[m] = Route(link, message.incarnation)
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
        self.at(
          self.now + self.merge_seconds,
          lambda: self.tell_syncer(ev.MergeDone(self.now, round_, 8, 1.0)),
        )
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
        self._syncer_wakes_at = at
        self.at(at, lambda: self._wake_syncer(at))
      case fx.Disconnect(learner=m, incarnation=incarnation):
        self._disconnect(m, incarnation, effect.reason)
      case fx.Finish():
        self.end = effect

  def _wake_syncer(self, at: float) -> None:
    if self._syncer_wakes_at == at:
      self.tell_syncer(ev.TimePassed(self.now))

  def _disconnect(self, m: int, incarnation: int, reason: str) -> None:
    """The learner sees its connection close, and makes a new one."""
    learner = self.learners[m]
    route = self._routes.get(m)
    if route is None or route.incarnation != incarnation:
      return
    del self._routes[m]

    def closed():
      if learner.link == route.link:
        lost = ev.ConnectionLost(self.now, m, incarnation, reason)
        self._tell_learner(m, lost)
        self._connect(m)

    self.at(self.now + self.latency, closed)

  # A learner's shell.

  def _to_syncer(self, m: int, message: msg.Message) -> None:
    learner = self.learners[m]
    link = learner.link

    def arrive(facts: ev.PayloadFacts | None):
      if learner.link == link:
        self.tell_syncer(ev.MessageArrived(self.now, message, facts))

    payloads: tuple[ev.PayloadFacts | None, ...] = (None,)
    if isinstance(message, msg.Contribution):
      payloads = self.arrivals(message)
    if not learner.is_partitioned:
      for facts in payloads:
        self.at(self._arrival(message), lambda facts=facts: arrive(facts))

  def _to_learner(self, m: int, message: msg.Message) -> None:
    learner = self.learners[m]
    # A rejection goes the way that the hello came.
    link = learner.link
    if not isinstance(message, msg.Rejection):
      if m not in self._routes:
        return
      link = self._routes[m].link

    def arrive():
      if learner.link == link:
        self._tell_learner(m, ev.MessageArrived(self.now, message))

    self.at(self._arrival(message), arrive)

  def _arrival(self, message: msg.Message) -> float:
    is_bulk = isinstance(message, msg.Contribution | msg.Publication)
    return self.now + self.latency + is_bulk * self.bulk_seconds

  def _pulse(self, m: int, link: int) -> None:
    learner = self.learners[m]
    if learner.link != link or learner.end or self.end:
      return
    if learner.state.is_connected:
      state = learner.state
      beat = msg.Heartbeat(
        m,
        state.incarnation,
        str(state.phase),
        state.total_steps,
        state.total_tokens,
        tokens_per_second=0.0,
      )
      self._to_syncer(m, beat)
    self.at(
      self.now + self.options.membership.heartbeat_seconds,
      lambda: self._pulse(m, link),
    )

  def _tell_learner(self, m: int, event: ev.Event) -> None:
    learner = self.learners[m]
    if not learner.is_alive:
      return
    learner.state, effects = learner.machine.step(learner.state, event)
    learner.tape.append((event, effects))
    for effect in effects:
      self._execute_for_learner(m, effect)

  def _wake_learner(self, m: int, life: int, at: float) -> None:
    learner = self.learners[m]
    if learner.life == life and learner.wake_at == at:
      self._tell_learner(m, ev.TimePassed(self.now))

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
      case fx.WakeAt(at=at):
        learner.wake_at = at
        life = learner.life
        self.at(at, lambda: self._wake_learner(m, life, at))
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
