"""What a virtual cluster is made of; all of it resolved, nothing by name."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import optax

from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.array_types import Params
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.protocol.learner_state import LeadOptions
from decoupled_diloco.protocol.syncer_state import SyncerOptions
from decoupled_diloco.simulate.options import (
  EngineOptions,
  FailureOptions,
  LinkOptions,
  SpeedOptions,
)
from decoupled_diloco.tasks import Batch, Task
from decoupled_diloco.training.evaluation import held_out_loss
from decoupled_diloco.training.inner import LearningRate
from decoupled_diloco.training.outer_options import OuterOptions
from decoupled_diloco.training.wire_format import WireOptions

# `batches(first, count)`: batches number `first` to `first + count - 1` of a
# learner, stacked [count, batch, ...]; the same ones whenever it is called.
Batches: TypeAlias = Callable[[int, int], Any]
Evaluate: TypeAlias = Callable[[Params], float]


@dataclasses.dataclass(frozen=True)
class LearnerSetup:
  """One learner.

  Attributes:
    batches: its data, for example `TextPipeline.scan_batches`. Learners may
      differ in their batch sizes.
    speed: how fast it trains.
    link: its way to the syncer.
  """

  batches: Batches
  speed: SpeedOptions = dataclasses.field(default_factory=SpeedOptions)
  link: LinkOptions = dataclasses.field(default_factory=LinkOptions)


@dataclasses.dataclass(frozen=True)
class VirtualSetup:
  """A virtual cluster.

  The methods differ in `syncer` and `on_lead_limit` only. Decoupled: K_min < M,
  'train'. Streaming DiLoCo: K_min = M, 'wait', max_rounds_in_flight of 0 (or of
  as many rounds as the overlap lasts). DiLoCo: the same, with P = 1. Plain data
  parallelism of the same setup is `data_parallel.run`.

  Attributes:
    task: what is trained.
    plan: the fragments of its parameters.
    inner: the inner optimizer.
    learners: M of them.
    syncer: schedule, quorum, grace, staleness, budget, ...
    learning_rate: of the inner optimizer, as in `make_train_scan`.
    on_lead_limit: what a learner does at `max_rounds_in_flight`.
    wire, adopt, outer: codecs, adoption, outer optimizer.
    failures: what goes wrong.
    merge_seconds, detection_seconds, has_heartbeats: as in `EngineOptions`.
    evaluate: loss of the global parameters; None: none is measured. See
      `held_out`.
    evaluate_every_rounds: merged rounds between two evaluations; 0: only before
      the first round and after the last.
    snapshot_every_scans: as in `EngineOptions`. Without, a learner that was
      killed comes back with a fresh state of its optimizer, and warms up again.
    max_seconds: virtual time at which the run is asked to drain.
    learners_at_once: 'vmap' computes all learners whose scans overlap in one
      program, 'one' one after the other; None chooses 'one' on CPU, where it is
      faster, and 'vmap' elsewhere.
    seed: of parameters, random streams, scan times, losses and failures.
  """

  task: Task
  plan: FragmentPlan
  inner: optax.GradientTransformation
  learners: tuple[LearnerSetup, ...]
  syncer: SyncerOptions
  learning_rate: LearningRate | None = None
  on_lead_limit: Literal['train', 'wait'] = 'train'
  wire: WireOptions = dataclasses.field(default_factory=WireOptions)
  adopt: AdoptOptions = dataclasses.field(default_factory=AdoptOptions)
  outer: OuterOptions = dataclasses.field(default_factory=OuterOptions)
  failures: FailureOptions = dataclasses.field(default_factory=FailureOptions)
  merge_seconds: float = 0.0
  detection_seconds: float = 0.0
  has_heartbeats: bool = True
  evaluate: Evaluate | None = None
  evaluate_every_rounds: int = 0
  snapshot_every_scans: int = 0
  max_seconds: float = math.inf
  learners_at_once: Literal['vmap', 'one'] | None = None
  seed: int = 0

  def __post_init__(self):
    LeadOptions(self.syncer.max_rounds_in_flight, self.on_lead_limit)
    P = self.syncer.schedule.num_fragments
    if self.plan.num_fragments != P:
      raise ValueError(
        f'The plan has {self.plan.num_fragments} fragments, but num_fragments='
        f'{P} in the schedule; make the plan with as many.'
      )
    if self.evaluate_every_rounds < 0:
      raise ValueError(
        f'evaluate_every_rounds={self.evaluate_every_rounds} must not be '
        'negative; 0 for never.'
      )
    if not self.max_seconds > 0:
      raise ValueError(f'max_seconds={self.max_seconds} must be positive.')
    if self.learners_at_once not in (None, 'vmap', 'one'):
      raise ValueError(
        f"learners_at_once={self.learners_at_once!r} must be 'vmap', 'one' or "
        'None.'
      )
    self._check_quorum()
    self.engine  # Checks itself.  # noqa: B018

  def _check_quorum(self) -> None:
    """Nothing else would end a run in which rounds wait for ever."""
    gone = {
      fault.learner
      for fault in self.failures.schedule
      if fault.kind == 'leave' or math.isinf(fault.seconds)
      if fault.kind != 'join'
    }
    left, required = len(self.learners) - len(gone), self.syncer.quorum
    if left < required.min_learners and math.isinf(self.max_seconds):
      raise ValueError(
        f'{left} learners are left in the end, fewer than min_learners='
        f'{required.min_learners}: rounds would wait for ever. Lower it, or '
        'set max_seconds.'
      )

  @functools.cached_property
  def engine(self) -> EngineOptions:
    """The simulated part of it."""
    return EngineOptions(
      syncer=self.syncer,
      speeds=tuple(learner.speed for learner in self.learners),
      links=tuple(learner.link for learner in self.learners),
      failures=self.failures,
      on_lead_limit=self.on_lead_limit,
      keeps_progress=self.adopt.rule == 'rebase',
      merge_seconds=self.merge_seconds,
      detection_seconds=self.detection_seconds,
      snapshot_every_scans=self.snapshot_every_scans,
      has_heartbeats=self.has_heartbeats,
      seed=self.seed,
    )

  @property
  def is_vmapped(self) -> bool:
    """Whether learners are computed together."""
    if self.learners_at_once is None:
      return jax.default_backend() != 'cpu'
    return self.learners_at_once == 'vmap'

  def initial_params(self) -> Params:
    """The parameters that the run begins with."""
    return jax.jit(self.task.init)(jax.random.key(self.seed))

  def stream(self, learner: int) -> jax.Array:
    """Key of a learner's random stream."""
    return jax.random.fold_in(jax.random.key(self.seed), 1 + learner)


def held_out(task: Task, batches: Sequence[Batch]) -> Evaluate:
  """Measures parameters on these batches, in nats per token."""
  return lambda params: held_out_loss(task, params, batches)
