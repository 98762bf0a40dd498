"""The protocol's machines on a virtual clock: a discrete-event simulation.

Learners, the syncer and the network between them in one process, without any
arrays: scans, merges and messages take the time that the options give them, and
all decisions are those of `protocol/`. What happens to arrays is up to a
`Work`: that of `virtual/` trains, `NoWork` only has sizes.

The same options give the same events, to the last bit.
"""

import math
import random
from collections.abc import Callable

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol.learner_state import LearnerOptions
from decoupled_diloco.protocol.machine import OnStep
from decoupled_diloco.simulate import failures
from decoupled_diloco.simulate.agenda import Agenda
from decoupled_diloco.simulate.connection import Connection
from decoupled_diloco.simulate.learner_shell import LearnerShell
from decoupled_diloco.simulate.options import EngineOptions, SpeedOptions
from decoupled_diloco.simulate.syncer_shell import SyncerShell
from decoupled_diloco.simulate.work import Work


def _ignore(event: ev.Event, effects: object) -> None:
  del event, effects


class Engine:
  """A cluster on a virtual clock.

  Args:
    options: what it is made of.
    work: what happens to arrays.
    record: is told every event of the syncer with its effects, in order.
    record_learner: the same of every learner, with its number before them.
  """

  learner_shell = LearnerShell

  def __init__(
    self,
    options: EngineOptions,
    work: Work,
    *,
    record: OnStep = _ignore,
    record_learner: Callable[..., object] | None = None,
  ):
    self.engine_options = options
    self.agenda = Agenda()
    self.syncer = SyncerShell(
      self.agenda,
      options.syncer,
      work,
      merge_seconds=options.merge_seconds,
      tell_learner=lambda connection, *message: self.learners[
        connection.learner
      ].hear(connection, *message),
      on_closed=self._on_closed,
      record=record,
    )
    self._partitioned: set[int] = set()
    M = options.syncer.membership.num_learners
    self._losses = [random.Random(f'{options.seed} loss {m}') for m in range(M)]
    self.learners = [
      self._make_learner(m, work, record_learner) for m in range(M)
    ]
    for m in range(M):
      joins_at = options.failures.joins_at(m)
      if joins_at > 0:
        self.at(joins_at, self.learners[m].start)
      else:
        self.learners[m].start()
    failures.plan(self, options.failures, options.seed)

  def _make_learner(
    self, m: int, work: Work, record_learner: Callable[..., object] | None
  ) -> LearnerShell:
    options = self.engine_options
    syncer = options.syncer
    heartbeat_seconds = syncer.membership.heartbeat_seconds
    record = _ignore
    if record_learner is not None:

      def record(event, effects):
        record_learner(m, event, effects)

    return self.learner_shell(
      LearnerOptions(
        learner=m,
        schedule=syncer.schedule,
        max_rounds_in_flight=syncer.max_rounds_in_flight,
        on_lead_limit=options.on_lead_limit,
        keeps_progress=options.keeps_progress,
      ),
      agenda=self.agenda,
      syncer=self.syncer,
      work=work,
      layout=syncer.layout,
      scan_seconds=scan_times(
        options.speeds[m],
        syncer.schedule.steps_per_scan,
        random.Random(f'{options.seed} scans {m}'),
      ),
      connect=lambda: self._connect(m),
      heartbeat_seconds=(
        heartbeat_seconds if options.has_heartbeats else math.inf
      ),
      snapshot_every_scans=options.snapshot_every_scans,
      record=record,
    )

  @property
  def now(self) -> float:
    """The time, in seconds."""
    return self.agenda.now

  @property
  def end(self) -> fx.Finish | None:
    """How the run has ended; None before that."""
    return self.syncer.end

  def at(self, time: float, action: Callable[[], object]) -> None:
    """Has something happen at a time."""
    self.agenda.at(time, action)

  def run(self, until: float = math.inf) -> None:
    """Runs until the run has ended and everybody knows, or time is up."""
    self.agenda.run(until)

  # What befalls learners.

  def start(self, m: int) -> None:
    """Starts a learner's process anew."""
    self.learners[m].start()

  def kill(self, m: int) -> None:
    """Ends a learner's process; the syncer notices after a while."""
    connection = self.learners[m].connection
    self.learners[m].kill()
    if connection is not None:
      connection.cut()
      self._later(lambda: self.syncer.lose(connection, 'killed'))

  def partition(self, m: int, is_noticed: bool = True) -> None:
    """Cuts a learner's link; both sides notice, or only the learner does."""
    self._partitioned.add(m)
    connection = self.learners[m].connection
    if connection is None:
      return
    connection.cut()
    if is_noticed:
      self._later(lambda: self.syncer.lose(connection, 'cut'))
    self._later(lambda: self.learners[m].lose(connection, 'cut'))

  def heal(self, m: int) -> None:
    """Restores a learner's link; it says hello again."""
    self._partitioned.discard(m)
    learner = self.learners[m]
    if not learner.is_alive or learner.end is not None:
      return
    if learner.connection is not None:
      learner.lose(learner.connection, 'cut')
    learner.connect()

  def is_partitioned(self, m: int) -> bool:
    """Whether a learner's link is cut."""
    return m in self._partitioned

  def is_away(self, m: int) -> bool:
    """Whether a learner cannot be reached, or does not want to be."""
    learner = self.learners[m]
    return not learner.is_alive or bool(learner.end) or self.is_partitioned(m)

  def kill_syncer(self) -> None:
    """Ends the syncer's process; learners notice after a while."""
    self.syncer.kill()
    for learner in self.learners:
      connection = learner.connection
      if connection is not None:
        connection.cut()
        self._later(
          lambda learner=learner, connection=connection: learner.lose(
            connection, 'the syncer is gone'
          )
        )

  def start_syncer(self) -> None:
    """Starts the syncer's process anew; who can reach it says hello."""
    self.syncer.start()
    for m, learner in enumerate(self.learners):
      if not self.is_away(m):
        if learner.connection is not None:
          learner.lose(learner.connection, 'the syncer is gone')
        learner.connect()

  def _later(self, notice: Callable[[], object]) -> None:
    seconds = self.engine_options.detection_seconds
    if seconds > 0:
      self.at(self.now + seconds, notice)
    else:
      notice()

  def _connect(self, m: int) -> Connection | None:
    if m in self._partitioned or not self.syncer.is_alive:
      return None
    return Connection(
      self.agenda,
      m,
      self.engine_options.links[m],
      self.engine_options.syncer.schedule.num_fragments,
      self._losses[m],
    )

  def _on_closed(self, connection: Connection, reason: str) -> None:
    """A learner sees that the syncer has closed its connection."""
    learner = self.learners[connection.learner]
    if learner.connection is connection:
      learner.lose(connection, reason)
      if learner.end is None:
        learner.connect()


def scan_times(
  speed: SpeedOptions, steps_per_scan: int, dice: random.Random
) -> Callable[[], float]:
  """Draws the times of one learner's scans, one after the other."""
  mean = speed.step_seconds * steps_per_scan
  if not speed.variation:
    return lambda: mean
  # Of exp(N(mu, sigma^2)) the mean is exp(mu + sigma^2 / 2) and the variance
  # mean^2 (exp(sigma^2) - 1).
  variance = math.log1p(speed.variation**2)
  sigma, mu = math.sqrt(variance), -variance / 2
  return lambda: mean * dice.lognormvariate(mu, sigma)
