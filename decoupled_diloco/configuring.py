"""Configurations: an ml_collections ConfigDict becomes validated options, once.

A config file's `get_config()` starts from `default_config()`, whose sections
are the options of the modules with their defaults, and changes what it needs:

  from decoupled_diloco import configuring

  def get_config():
    config = configuring.default_config()
    config.schedule.sync_every = 24
    return config

Fields that follow from others are not in the config: the model's vocabulary and
sequence length and the images' size come from the data, the number of data
shards from the number of learners, the length of the learning rate's decay from
the budget. If that is one of tokens alone, the learning rate follows the tokens
merged, otherwise the rounds.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
from ml_collections import config_dict

from decoupled_diloco import overrides
from decoupled_diloco.config_files import unknown_field
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.syncer_state import BudgetOptions
from decoupled_diloco.run_options import ROLES
from decoupled_diloco.run_options import RunOptions as RunOptions

_TOP = {
  'role': 'local',
  'workdir': 'runs/default',
  'seed': 0,
  'learner': 0,
  'resume': False,
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
  'vit': ('image_size', 'channels', 'num_classes'),
  'images': ('num_shards', 'seed'),
  'inner': ('decay_steps',),
  'schedule': ('tokens_per_step',),
}
_TYPES: Mapping[type, str] = {
  bool: 'True or False',
  int: 'a whole number',
  float: 'a number',
  str: 'text',
}


def default_config() -> Any:
  """All fields with their defaults, as a ConfigDict.

  The section `learners` is empty: `config.learners = {'2': {'throttle':
  {'step_seconds': 0.05}}}` overrides fields for learner 2 alone.
  """
  sections = {
    name: ml_collections.ConfigDict(
      {field.name: _default(field) for field in _fields(name)}
    )
    for name in _SECTIONS
  }
  config = ml_collections.ConfigDict(
    {**_TOP, **sections}, allow_dotted_keys=False
  )
  config.learners = ml_collections.ConfigDict()
  config.lock()
  config.learners.unlock()
  return config


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
  missing = {*_TOP, *_SECTIONS, 'learners'} - raw.keys()
  if missing:
    raise ValueError(
      'a config must have all sections and fields, and '
      f'{", ".join(sorted(missing))} are missing; begin get_config() with '
      'configuring.default_config().'
    )
  changes = raw.pop('learners')
  if raw['role'] not in ROLES:
    raise ValueError(
      f'config.role={raw["role"]!r} must be one of {", ".join(ROLES)}.'
    )
  if learner is None and raw['role'] == 'learner':
    learner = raw['learner']
  sections = {name: raw[name] for name in _SECTIONS}
  M = _section('membership', raw).num_learners
  overrides.check(changes, sections, M)
  of_each = [
    overrides.applied(sections, changes.get(str(m), {})) for m in range(M)
  ]
  own = overrides.applied(sections, changes.get(str(learner), {}))
  tokens = _tokens_per_step(raw['task'], of_each)
  return _build({**raw, **own, 'tokens_per_step': tokens})


def _tokens_per_step(task: str, learners: Sequence[Mapping[str, Any]]) -> int:
  """Tokens of all learners together in an inner step; images count as one."""
  if task == 'image':
    return sum(_section('images', own).batch_size for own in learners)
  batches = [_section('data', own) for own in learners]
  return sum(each.batch_size * each.sequence_length for each in batches)


def _fields(section: str) -> list[dataclasses.Field[Any]]:
  """The fields of a section that are in the config."""
  derived = _DERIVED.get(section, ())
  return [
    field
    for field in dataclasses.fields(_SECTIONS[section])
    if field.name not in derived
  ]


def _default(field: dataclasses.Field[Any]) -> Any:
  if field.default is None:
    # ConfigDict checks the type that the field has when it is not None.
    return config_dict.placeholder(_without_none(field.type))
  if field.default is not dataclasses.MISSING:
    return field.default
  return field.default_factory()  # pyright: ignore[reportCallIssue]


def _without_none(type_: Any) -> Any:
  """float for float | None; a type that is no such union as it is."""
  members = {*typing.get_args(type_)}
  if type(None) not in members:
    return type_
  [member, *others] = members - {type(None)}
  return object if others else member


def _build(raw: Mapping[str, Any]) -> RunOptions:
  num_learners = _section('membership', raw).num_learners
  budget = _section('budget', raw)
  tokens_per_step = 0 if budget.rounds else raw['tokens_per_step']
  schedule = _section('schedule', raw, {'tokens_per_step': tokens_per_step})
  derived = {
    'model': {'sequence_length': raw['data']['sequence_length']},
    'data': {'num_shards': num_learners, 'seed': raw['seed']},
    'images': {'num_shards': num_learners, 'seed': raw['seed']},
    'inner': _decay(schedule, budget, raw['inner']),
    'schedule': {'tokens_per_step': tokens_per_step},
  }
  sections = {
    name: _section(name, raw, derived.get(name, {})) for name in _SECTIONS
  }
  return RunOptions(**{name: raw[name] for name in _TOP}, **sections)


def _decay(
  schedule: ScheduleOptions, budget: BudgetOptions, inner: Mapping[str, Any]
) -> dict[str, Any]:
  if inner['decay'] == 'constant':
    return {}
  steps = budget.steps(schedule)
  if steps <= inner['warmup_steps']:
    name = 'rounds' if budget.rounds else 'merged_tokens'
    raise ValueError(
      f'config.budget.{name}={getattr(budget, name)} makes {steps} inner '
      'steps, which must exceed config.inner.warmup_steps='
      f'{inner["warmup_steps"]}; raise the first or lower the second.'
    )
  return {'decay_steps': steps}


def _section(
  name: str, raw: Mapping[str, Any], derived: Mapping[str, Any] | None = None
) -> Any:
  """The options of a section.

  Raises:
    ValueError: if a value has the wrong type, or breaks a rule.
  """
  fields = {field.name: field for field in _fields(name)}
  for field, value in raw[name].items():
    if field not in fields:
      raise ValueError(unknown_field(f'config.{name}', field, fields))
    _check_type(f'config.{name}.{field}', value, fields[field])
  try:
    return _SECTIONS[name](**raw[name], **(derived or {}))
  except ValueError as error:
    raise ValueError(f'config.{name}: {error}') from error


def _check_type(name: str, value: Any, field: dataclasses.Field[Any]) -> None:
  """Refuses what arithmetic and comparisons would choke on.

  The fields of a ConfigDict check themselves, but those of overrides do not.
  """
  if value is None and field.default is None:
    return
  wanted: Any = _without_none(field.type)
  rule = _TYPES.get(wanted)
  if rule is None:
    return  # Tuples and choices.
  is_right = isinstance(value, (int, float) if wanted is float else wanted)
  if not is_right or (isinstance(value, bool) and wanted is not bool):
    raise ValueError(
      f'{name}={value!r} must be {rule}; the default is {field.default!r}.'
    )
