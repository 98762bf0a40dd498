"""What a simulated cluster is made of: speeds, links, failures."""

import dataclasses
import math
from typing import Literal

from decoupled_diloco.protocol.syncer_state import SyncerOptions

FAULT_KINDS = ('kill', 'partition', 'silent', 'leave', 'join', 'syncer')


@dataclasses.dataclass(frozen=True, slots=True)
class SpeedOptions:
  """How fast a learner trains.

  Attributes:
    step_seconds: mean time of an inner step.
    variation: standard deviation of a scan's time, relative to its mean; times
      are lognormal, so never negative.
  """

  step_seconds: float = 1.0
  variation: float = 0.0

  def __post_init__(self):
    if not 0 < self.step_seconds < math.inf:
      raise ValueError(
        f'step_seconds={self.step_seconds} must be positive and finite.'
      )
    if not 0 <= self.variation < math.inf:
      raise ValueError(
        f'variation={self.variation} must not be negative; 0.1 is 10 %.'
      )


@dataclasses.dataclass(frozen=True, slots=True)
class LinkOptions:
  """The way between a learner and the syncer.

  Messages without a payload take the latency. Payloads also take their
  size / `bytes_per_second`, one after the other in each direction, and are
  overtaken by messages without one.

  Attributes:
    latency_seconds: one way.
    bytes_per_second: rate of payloads in each direction; 0: unlimited.
    loss: probability that a payload is lost.
    on_loss: what that means. 'damaged': it arrives and its checksum is wrong,
      as when bytes go missing on a real link: a contribution is refused and
      sent again, of a publication the value is asked for. 'dropped': the sender
      gives it up, as when its queue is full: the learner is told so, a learner
      that should get a publication gets the value at its next sign of life.
    up_queue: hand-overs that wait to be sent, at most (but never fewer than
      there are fragments, for the drain); the oldest is dropped for a new one.
    down_queue: publications that wait, at most; more are sent as values later.
    down_latency_seconds: of the way from the syncer, if it is another.
  """

  latency_seconds: float = 0.0
  bytes_per_second: float = 0.0
  loss: float = 0.0
  on_loss: Literal['damaged', 'dropped'] = 'damaged'
  up_queue: int = 2
  down_queue: int = 64
  down_latency_seconds: float | None = None

  def __post_init__(self):
    for name in ('latency_seconds', 'bytes_per_second', 'down_seconds'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(
          f'{name}={getattr(self, name)} must be finite and not negative.'
        )
    if not 0 <= self.loss < 1:
      raise ValueError(
        f'loss={self.loss} must be in [0, 1): with 1 nothing ever arrives.'
      )
    if self.on_loss not in ('damaged', 'dropped'):
      raise ValueError(
        f"on_loss={self.on_loss!r} must be 'damaged' or 'dropped'."
      )
    for name in ('up_queue', 'down_queue'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)} must be at least 1.')

  @property
  def down_seconds(self) -> float:
    """Latency of the way from the syncer."""
    down = self.down_latency_seconds
    return self.latency_seconds if down is None else down


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
  """Something that happens to a learner, or to the syncer.

  Attributes:
    at: when, in seconds.
    learner: to whom; nothing happens if it is away already. Without meaning if
      it happens to the syncer.
    kind: 'kill': its process ends; it is started anew afterwards. 'partition':
      its link is cut, and both sides notice. 'silent': the same, but the syncer
      has only the silence to tell. 'leave': it says farewell after its scan,
      for good. 'join': it is not there before. 'syncer': the process of the
      syncer ends; it is started anew afterwards and goes on with the merges
      that were durable.
    seconds: of a kill or a partition, how long until it is back; infinity:
      never. Otherwise without meaning.
  """

  at: float
  learner: int
  kind: str
  seconds: float = math.inf

  def __post_init__(self):
    if self.kind not in FAULT_KINDS:
      raise ValueError(
        f'kind={self.kind!r} of a fault must be one of '
        f'{", ".join(map(repr, FAULT_KINDS))}.'
      )
    if not 0 <= self.at < math.inf or not self.seconds >= 0:
      raise ValueError(
        f'A fault must have at={self.at} finite, and at and '
        f'seconds={self.seconds} not negative.'
      )


@dataclasses.dataclass(frozen=True, slots=True)
class FailureOptions:
  """What goes wrong.

  Attributes:
    schedule: faults at given times.
    mean_seconds_between: of each learner, the mean time from its return (or
      the start) to its next kill, exponentially distributed; 0: none but those
      of the schedule.
    mean_repair_seconds: the mean time until it is back, likewise.
  """

  schedule: tuple[Fault, ...] = ()
  mean_seconds_between: float = 0.0
  mean_repair_seconds: float = 0.0

  def __post_init__(self):
    for name in ('mean_seconds_between', 'mean_repair_seconds'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(
          f'{name}={getattr(self, name)} must be finite and not negative.'
        )
    joins = [fault.learner for fault in self.schedule if fault.kind == 'join']
    if len(joins) != len(set(joins)):
      raise ValueError(f'A learner can join once, but they are {joins}.')

  def joins_at(self, learner: int) -> float:
    """When a learner is there for the first time."""
    times = (
      fault.at
      for fault in self.schedule
      if fault.kind == 'join' and fault.learner == learner
    )
    return next(times, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
  """A cluster to simulate.

  Attributes:
    syncer: options of the syncer; the learners' follow from them.
    speeds: of every learner; their number is M.
    links: of every learner.
    failures: what goes wrong.
    on_lead_limit: 'train' or 'wait', as in `LeadOptions`.
    keeps_progress: whether adoption leaves in place what no merge has seen.
    merge_seconds: time of a merge; merges of different fragments overlap.
    detection_seconds: until both sides notice that a connection has broken.
    snapshot_every_scans: a learner that was killed comes back with its last
      snapshot, of which it makes one after so many scans; 0: with nothing.
    has_heartbeats: whether learners send them. Without, contributions are the
      only signs of life, and the liveness timeout must be longer than a scan.
    seed: of scan times, losses and failures; each has a stream of its own.
  """

  syncer: SyncerOptions
  speeds: tuple[SpeedOptions, ...]
  links: tuple[LinkOptions, ...]
  failures: FailureOptions = FailureOptions()
  on_lead_limit: str = 'train'
  keeps_progress: bool = False
  merge_seconds: float = 0.0
  detection_seconds: float = 0.0
  snapshot_every_scans: int = 0
  has_heartbeats: bool = True
  seed: int = 0

  def __post_init__(self):
    M = self.syncer.membership.num_learners
    if len(self.speeds) != M or len(self.links) != M:
      raise ValueError(
        f'num_learners={M} needs as many speeds and links, but there are '
        f'{len(self.speeds)} and {len(self.links)}.'
      )
    for name in ('merge_seconds', 'detection_seconds'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(
          f'{name}={getattr(self, name)} must be finite and not negative.'
        )
    if self.snapshot_every_scans < 0:
      raise ValueError(
        f'snapshot_every_scans={self.snapshot_every_scans} must not be '
        'negative; 0 for never.'
      )
    if not self.has_heartbeats and self.on_lead_limit == 'wait':
      raise ValueError(
        "has_heartbeats=False with on_lead_limit='wait': a learner that waits "
        'for a publication gives no sign of life without heartbeats, and would '
        'never be sent what was dropped. Set has_heartbeats=True.'
      )
    timeout = self.syncer.membership.liveness_timeout_seconds
    for m, link in enumerate(self.links):
      round_trip = link.latency_seconds + link.down_seconds
      if round_trip >= timeout:
        raise ValueError(
          f'learner {m} can never join: its round trip takes {round_trip} s, '
          f'and with liveness_timeout_seconds={timeout} it counts as absent '
          'before it can answer; raise the timeout.'
        )
    for fault in self.failures.schedule:
      if not 0 <= fault.learner < M:
        raise ValueError(
          f'{fault} must happen to one of the learners 0 to {M - 1}.'
        )
