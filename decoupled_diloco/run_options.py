"""What a process of a run needs to know: the options of all parts, as one.

Sections of a config are fields of `RunOptions`. The options of a part, and
their defaults, are where the part is; here are those of the entry points, and
the rules that span several parts.
"""

import dataclasses

from decoupled_diloco.data import ImageOptions, TextOptions
from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.models.vit import VitOptions
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.packing import PATTERNS
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.learner_state import LeadOptions
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.outliers import OutlierOptions
from decoupled_diloco.protocol.quorum import QuorumOptions
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.syncer_state import BudgetOptions
from decoupled_diloco.protocol.weights import StalenessOptions
from decoupled_diloco.runtime.durability_options import DurabilityOptions
from decoupled_diloco.runtime.launch_options import LaunchOptions
from decoupled_diloco.runtime.snapshot_options import SnapshotOptions
from decoupled_diloco.runtime.throttle import ThrottleOptions
from decoupled_diloco.training.inner import InnerOptions
from decoupled_diloco.training.mesh import MeshOptions
from decoupled_diloco.training.outer_options import OuterOptions
from decoupled_diloco.training.wire_format import WireOptions
from decoupled_diloco.transport.addresses import split_address
from decoupled_diloco.transport.options import TransportOptions
from decoupled_diloco.transport.security import SecurityOptions

ROLES = ('local', 'syncer', 'learner')


@dataclasses.dataclass(frozen=True)
class FragmentOptions:
  """How the parameters are divided; P is `schedule.num_fragments`.

  Attributes:
    pattern: 'balanced', 'strided' or 'layers'.
  """

  pattern: str = 'balanced'

  def __post_init__(self):
    if self.pattern not in PATTERNS:
      raise ValueError(
        f'pattern={self.pattern!r} must be one of {", ".join(PATTERNS)}.'
      )


@dataclasses.dataclass(frozen=True)
class SyncerAddressOptions:
  """Where the syncer is.

  Attributes:
    address: host:port; the syncer listens there, learners connect to it. Port 0
      lets the syncer of a local run choose a free one.
    connect_seconds: how long a learner looks for the syncer before it gives up.
  """

  address: str = '127.0.0.1:0'
  connect_seconds: float = 60.0

  def __post_init__(self):
    split_address(self.address)
    if self.connect_seconds <= 0:
      raise ValueError(
        f'connect_seconds={self.connect_seconds} must be positive; a minute is '
        'usual.'
      )


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
  """What is measured, and shown, when a run ends.

  Attributes:
    batches: held-out batches for the loss of the global model; 0 for none.
    sample_tokens: length of the sample from the trained model; 0 for none.
    prompt: text that the sample continues.
    temperature: of sampling.
  """

  batches: int = 32
  sample_tokens: int = 300
  prompt: str = '\n'
  temperature: float = 0.8

  def __post_init__(self):
    if self.batches < 0 or self.sample_tokens < 0:
      raise ValueError(
        f'batches={self.batches} and sample_tokens={self.sample_tokens} must '
        'not be negative; 0 leaves them out.'
      )
    if self.temperature <= 0:
      raise ValueError(f'temperature={self.temperature} must be positive.')
    if not self.prompt:
      raise ValueError("prompt='' must hold at least one character; try '\\n'.")


@dataclasses.dataclass(frozen=True)
class RunOptions:
  """Everything a process of a run needs to know, checked.

  Attributes:
    role: 'local' (syncer and learners as processes of this machine), 'syncer'
      or 'learner'.
    workdir: folder for whatever the run writes.
    seed: of initialisation, data order and sampling.
    learner: which learner this process is, if its role is 'learner'.
    resume: whether to continue the run in `workdir`, if there is one; otherwise
      a run there is an error.
    task: 'language_model' (`model` on `data`), 'image' (`vit` on `images`), or
      'package.module:function', a function from these options to a
      `tasks.Task` for the batches of `data`.
  """

  role: str
  workdir: str
  seed: int
  learner: int
  resume: bool
  task: str
  schedule: ScheduleOptions
  fragments: FragmentOptions
  membership: MembershipOptions
  quorum: QuorumOptions
  grace: GraceOptions
  staleness: StalenessOptions
  outliers: OutlierOptions
  lead: LeadOptions
  budget: BudgetOptions
  durability: DurabilityOptions
  outer: OuterOptions
  adopt: AdoptOptions
  wire: WireOptions
  model: TransformerOptions
  data: TextOptions
  vit: VitOptions
  images: ImageOptions
  inner: InnerOptions
  mesh: MeshOptions
  throttle: ThrottleOptions
  snapshots: SnapshotOptions
  syncer: SyncerAddressOptions
  transport: TransportOptions
  security: SecurityOptions
  launch: LaunchOptions
  evaluation: EvaluationOptions

  def __post_init__(self):
    """Checks the rules that span sections.

    Raises:
      ValueError: with the fields, the rule, the values and what to do.
    """
    _check_process(self)
    _check_rounds(self)
    _check_launch(self)
    if self.adopt.rule == 'rebase' and self.wire.up_error_feedback:
      raise ValueError(
        "config.wire.up_error_feedback=True with config.adopt.rule='rebase' "
        'would make up for quantisation twice; set one of them otherwise.'
      )


def _check_process(options: RunOptions) -> None:
  """Which process it is, and where it writes."""
  M = options.membership.num_learners
  if options.role not in ROLES:
    raise ValueError(
      f'config.role={options.role!r} must be one of {", ".join(ROLES)}.'
    )
  if options.role == 'learner' and not 0 <= options.learner < M:
    raise ValueError(
      f'config.learner={options.learner} must be one of 0 to {M - 1} '
      f'(config.membership.num_learners={M}).'
    )
  if not options.workdir.strip():
    raise ValueError(
      f'config.workdir={options.workdir!r} must name a folder; for example '
      "'runs/default'."
    )
  try:
    options.security.check_address(options.syncer.address)
  except ValueError as error:
    raise ValueError(f'config.syncer, config.security: {error}') from error
  if '://' in options.workdir:
    raise ValueError(
      f'config.workdir={options.workdir} must be a local folder: tapes and '
      'logs are appended to, which buckets cannot do; choose one on a disk.'
    )


def _check_rounds(options: RunOptions) -> None:
  """Whether rounds can be merged, and adopted in time."""
  M = options.membership.num_learners
  if options.quorum.min_learners > M:
    raise ValueError(
      f'config.quorum.min_learners={options.quorum.min_learners} must not '
      f'exceed config.membership.num_learners={M}: no round could ever be '
      'merged; lower the first or raise the second.'
    )
  lead, overlap = options.lead, options.grace.overlap_scans
  if lead.on_lead_limit == 'train' and lead.max_rounds_in_flight <= overlap:
    raise ValueError(
      f'config.lead.max_rounds_in_flight={lead.max_rounds_in_flight} must '
      f'exceed config.grace.overlap_scans={overlap:g}, the rounds that are in '
      'flight anyway; raise the first or lower the second.'
    )


def _check_launch(options: RunOptions) -> None:
  """Whether the faults to inject concern learners that there are."""
  M = options.membership.num_learners
  for learner, _ in options.launch.kill:
    if isinstance(learner, int) and not 0 <= learner < M:
      raise ValueError(
        f'config.launch.kill={options.launch.kill} names learner {learner}; '
        f'name one of 0 to {M - 1}.'
      )
