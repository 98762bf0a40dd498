"""Configurations: an ml_collections ConfigDict becomes validated options, once.

A config file's `get_config()` starts from `default_config()`, whose sections
are the options of the modules with their defaults, and changes what it needs:

  from decoupled_diloco import configuring

  def get_config():
    config = configuring.default_config()
    config.schedule.sync_every = 24
    return config

Fields that follow from others are not in the config: the model's vocabulary and
sequence length come from the data, the number of data shards from the number of
learners, the length of the learning rate's decay from the budget.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_collections
from ml_collections import config_dict

from decoupled_diloco.data import TextOptions
from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.packing import PATTERNS
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.learner_state import LeadOptions
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.quorum import QuorumOptions
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.syncer_state import BudgetOptions
from decoupled_diloco.protocol.weights import StalenessOptions
from decoupled_diloco.runtime.launch import LaunchOptions
from decoupled_diloco.runtime.learner_loop import PaceOptions
from decoupled_diloco.training.global_model import OuterOptions
from decoupled_diloco.training.inner import InnerOptions
from decoupled_diloco.training.mesh import MeshOptions
from decoupled_diloco.training.wire_format import WireOptions
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
    if self.connect_seconds <= 0:
      raise ValueError(
        f'connect_seconds={self.connect_seconds} must be positive.'
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
    task: 'language_model', or 'package.module:function', a function from these
      options to a `tasks.Task`.
  """

  role: str
  workdir: str
  seed: int
  learner: int
  task: str
  schedule: ScheduleOptions
  fragments: FragmentOptions
  membership: MembershipOptions
  quorum: QuorumOptions
  grace: GraceOptions
  staleness: StalenessOptions
  lead: LeadOptions
  budget: BudgetOptions
  outer: OuterOptions
  adopt: AdoptOptions
  wire: WireOptions
  model: TransformerOptions
  data: TextOptions
  inner: InnerOptions
  mesh: MeshOptions
  pace: PaceOptions
  syncer: SyncerAddressOptions
  transport: TransportOptions
  security: SecurityOptions
  launch: LaunchOptions
  evaluation: EvaluationOptions


_TOP = {
  'role': 'local',
  'workdir': 'runs/default',
  'seed': 0,
  'learner': 0,
  'task': 'language_model',
}
_SECTIONS: Mapping[str, type] = {
  field.name: field.type  # pyright: ignore[reportAssignmentType]
  for field in dataclasses.fields(RunOptions)
  if dataclasses.is_dataclass(field.type)
}
_DERIVED = {
  'model': ('vocab_size', 'sequence_length'),
  'data': ('num_shards', 'seed'),
  'inner': ('decay_steps',),
}


def default_config() -> Any:
  """All fields with their defaults, as a ConfigDict.

  The section `learners` is empty: `config.learners = {'2': {'pace':
  {'step_seconds': 0.05}}}` overrides fields for learner 2 alone.
  """
  sections = {
    name: ml_collections.ConfigDict(
      {
        field.name: _default(field)
        for field in dataclasses.fields(section)
        if field.name not in _DERIVED.get(name, ())
      }
    )
    for name, section in _SECTIONS.items()
  }
  config = ml_collections.ConfigDict(
    {**_TOP, **sections}, allow_dotted_keys=False
  )
  config.learners = ml_collections.ConfigDict()
  config.lock()
  config.learners.unlock()
  return config


def _default(field: dataclasses.Field[Any]) -> Any:
  if field.default is None:
    # A field that may be None has no type of its own to check yet.
    return config_dict.placeholder(object)
  if field.default is not dataclasses.MISSING:
    return field.default
  return field.default_factory()  # pyright: ignore[reportCallIssue]


def options_of(
  config: ml_collections.ConfigDict, learner: int | None = None
) -> RunOptions:
  """The options that a config describes.

  Args:
    config: from a config file.
    learner: whose overrides apply; by default those of `config.learner` if the
      role is 'learner', else none.

  Raises:
    ValueError: with the field, the rule, the value and what to do.
  """
  raw = config.to_dict()
  overrides = raw.pop('learners')
  if raw['role'] not in ROLES:
    raise ValueError(
      f'config.role={raw["role"]!r} must be one of {", ".join(ROLES)}.'
    )
  if learner is None and raw['role'] == 'learner':
    learner = raw['learner']
  _section('membership', raw)  # Its numbers are used in the next messages.
  for name, changes in overrides.items():
    _check_override(name, changes, raw)
    if str(learner) == name:
      raw = _merged(raw, changes)
  return _build(raw)


def _check_override(name: str, changes: Any, raw: Mapping[str, Any]) -> None:
  num_learners = raw['membership']['num_learners']
  if not name.isdigit() or int(name) >= num_learners:
    raise ValueError(
      f'config.learners names learner {name!r}, but there are the learners 0 '
      f'to {num_learners - 1} (config.membership.num_learners={num_learners}).'
    )
  for section, fields in changes.items():
    if section not in _SECTIONS or not isinstance(fields, Mapping):
      raise ValueError(
        f'config.learners[{name!r}] overrides {section!r}, which is no '
        f'section; there are {", ".join(_SECTIONS)}.'
      )
    for field in fields:
      if field not in raw[section]:
        raise ValueError(
          f'config.learners[{name!r}].{section} has no field {field!r}; there '
          f'are {", ".join(raw[section])}.'
        )


def _merged(
  raw: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
  return {
    **raw,
    **{
      section: {**raw[section], **fields} for section, fields in changes.items()
    },
  }


def _build(raw: Mapping[str, Any]) -> RunOptions:
  num_learners = raw['membership']['num_learners']
  schedule = _section('schedule', raw)
  budget = _section('budget', raw)
  derived = {
    'model': {'sequence_length': raw['data']['sequence_length']},
    'data': {'num_shards': max(num_learners, 1), 'seed': raw['seed']},
    'inner': _decay(schedule, budget, raw['inner']),
  }
  sections = {
    name: _section(name, raw, derived.get(name, {})) for name in _SECTIONS
  }
  options = RunOptions(**{name: raw[name] for name in _TOP}, **sections)
  _check_together(options)
  return options


def _decay(
  schedule: ScheduleOptions, budget: BudgetOptions, inner: Mapping[str, Any]
) -> dict[str, Any]:
  if inner['decay'] == 'constant':
    return {}
  if not budget.rounds:
    raise ValueError(
      f'config.inner.decay={inner["decay"]!r} needs config.budget.rounds, '
      'which is 0: the learning rate decays over the rounds of the run. Set it '
      "beside the token budget, or use decay='constant'."
    )
  steps = schedule.global_step_of(budget.rounds)
  if steps <= inner['warmup_steps']:
    raise ValueError(
      f'config.budget.rounds={budget.rounds} makes {steps} inner steps, which '
      f'must exceed config.inner.warmup_steps={inner["warmup_steps"]}; raise '
      'the first or lower the second.'
    )
  return {'decay_steps': steps}


def _section(
  name: str, raw: Mapping[str, Any], derived: Mapping[str, Any] | None = None
) -> Any:
  try:
    return _SECTIONS[name](**raw[name], **(derived or {}))
  except ValueError as error:
    raise ValueError(f'config.{name}: {error}') from error
  except TypeError as error:
    raise ValueError(
      f'config.{name} has a value of the wrong type ({error}): '
      f'{dict(raw[name])}.'
    ) from error


def _check_together(options: RunOptions) -> None:
  """The rules that span sections."""
  M = options.membership.num_learners
  if options.quorum.min_learners > M:
    raise ValueError(
      f'config.quorum.min_learners={options.quorum.min_learners} must not '
      f'exceed config.membership.num_learners={M}; no round could ever be '
      'merged.'
    )
  if options.role == 'learner' and not 0 <= options.learner < M:
    raise ValueError(
      f'config.learner={options.learner} must be one of 0 to {M - 1} '
      f'(config.membership.num_learners={M}).'
    )
  if options.adopt.rule == 'rebase' and options.wire.up_error_feedback:
    raise ValueError(
      "config.wire.up_error_feedback=True with config.adopt.rule='rebase' "
      'would make up for quantisation twice; set one of them otherwise.'
    )
  if options.lead.max_rounds_in_flight <= options.grace.overlap_scans and (
    options.lead.on_lead_limit == 'train'
  ):
    raise ValueError(
      f'config.lead.max_rounds_in_flight={options.lead.max_rounds_in_flight} '
      'must exceed config.grace.overlap_scans='
      f'{options.grace.overlap_scans:g}, the rounds that are in flight anyway; '
      'raise the first or lower the second.'
    )
  if options.fragments.pattern not in PATTERNS:
    raise ValueError(
      f'config.fragments.pattern={options.fragments.pattern!r} must be one of '
      f'{", ".join(PATTERNS)}.'
    )
  for learner, _ in options.launch.kill:
    if not 0 <= learner < M:
      raise ValueError(
        f'config.launch.kill names learner {learner}; there are 0 to {M - 1}.'
      )
