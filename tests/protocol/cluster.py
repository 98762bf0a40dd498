"""A simulated cluster, told by the test how long each scan takes.

It is `simulate.Engine` without any arrays; kept are all tapes, and questions to
that of the syncer can be asked.
"""

from collections.abc import Callable
from typing import Any

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.syncer_state import SyncerOptions
from decoupled_diloco.simulate.engine import Engine
from decoupled_diloco.simulate.learner_shell import LearnerShell
from decoupled_diloco.simulate.options import (
  EngineOptions,
  LinkOptions,
  SpeedOptions,
)
from decoupled_diloco.simulate.sender import Sender
from decoupled_diloco.simulate.work import NoWork, Payload, Work
from tests.protocol.accounts import Accounts, Tape
from tests.protocol.cluster_parts import (
  PAYLOAD_BYTES,
  TOKENS_PER_STEP,
)
from tests.protocol.cluster_parts import (
  syncer_options as syncer_options,
)

# What arrives of a contribution, once for each; if nothing, it is dropped.
Arrivals = Callable[[msg.Contribution], tuple[ev.PayloadFacts, ...]]


class _Sender(Sender):
  """Contributions may arrive otherwise than sent, or not at all."""

  script: Arrivals | None = None

  def arrivals(
    self, contribution: msg.Contribution, payload: Payload
  ) -> tuple[ev.PayloadFacts, ...]:
    """What the test says."""
    if self.script is None:
      return super().arrivals(contribution, payload)
    return self.script(contribution)


class Learner(LearnerShell):
  """A learner whose contributions the test may tamper with."""

  sender_class = _Sender


class Cluster(Engine, Accounts):
  """M learners and a syncer; `run` ends when all have ended.

  Args:
    options: of the syncer; the learners' follow from them.
    scan_seconds: per learner, how long its next scan takes.
    latency: seconds that a message takes, either way.
    merge_seconds: how long a merge takes.
    bulk_seconds: how much longer a message with a payload takes, one after the
      other; others overtake it.
    on_lead_limit, keeps_progress: of the learners.
    heartbeats: whether learners send them.
    snapshot_every_scans: as in `EngineOptions`.
    arrivals: what arrives of a contribution, if not what was sent.
    work: what happens to arrays; by default there are none.
  """

  learner_shell = Learner

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
    snapshot_every_scans: int = 0,
    arrivals: Arrivals | None = None,
    work: Work | None = None,
  ):
    self.options = options
    self.tape: Tape = []
    self.learner_tapes: list[Tape] = [[] for _ in scan_seconds]
    M, P = len(scan_seconds), options.schedule.num_fragments
    tokens = options.schedule.steps_per_scan * TOKENS_PER_STEP
    sizes = (PAYLOAD_BYTES,) * P
    link = LinkOptions(
      latency, PAYLOAD_BYTES / bulk_seconds if bulk_seconds else 0.0
    )
    super().__init__(
      EngineOptions(
        syncer=options,
        speeds=(SpeedOptions(),) * M,
        links=(link,) * M,
        on_lead_limit=on_lead_limit,
        keeps_progress=keeps_progress,
        merge_seconds=merge_seconds,
        has_heartbeats=heartbeats or on_lead_limit == 'wait',
        snapshot_every_scans=snapshot_every_scans,
      ),
      work or NoWork((tokens,) * M, sizes, sizes, sizes),
      record=lambda event, effects: self.tape.append((event, tuple(effects))),
      record_learner=lambda m, *step: self.learner_tapes[m].append(step),
    )
    for learner, seconds in zip(self.learners, scan_seconds, strict=True):
      learner.scan_seconds = seconds
      learner.sender.script = arrivals  # pyright: ignore

  def start(self, m: int) -> None:
    """Starts a learner's process anew, with a new tape."""
    self.learner_tapes[m].clear()
    super().start(m)

  @property
  def syncer_state(self):
    """What the syncer's machine remembers."""
    return self.syncer.state

  def run(self, until: float = 1e9) -> Any:
    """Runs until all have ended, nothing is left, or time is up."""
    super().run(until)
    return self

  def starts(self, m: int) -> list[int]:
    """The global steps at which a learner's scans began."""
    return [
      effect.global_step
      for _, effects in self.learner_tapes[m]
      for effect in effects
      if isinstance(effect, fx.StartScan)
    ]
