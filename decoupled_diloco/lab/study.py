"""What a study is: variants of one run, each with several seeds.

A study's config file builds it up:

  from decoupled_diloco.lab import study

  def get_config():
    config = study.default_study('presets')
    config.run.schedule.num_fragments = 6
    for H in (12, 24):
      for lr in (3e-3, 8e-3):
        study.add(
          config,
          factors={'H': H},
          choice={'inner lr': lr},
          changes={'schedule.sync_every': H, 'inner.learning_rate': lr},
        )
    return config

Variants of equal factors are one row of the table. They differ in their
`choice` (a learning rate, say), which is made for every row alike: by the mean
loss over the seeds. So a baseline is tuned as carefully as what it is compared
with, when it is given as many choices.
"""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import ml_collections

from decoupled_diloco.lab import run_config


def in_words(factors: Mapping[str, Any]) -> str:
  """Factors as people read them."""
  return ', '.join(f'{name}={value}' for name, value in factors.items())


@dataclasses.dataclass(frozen=True)
class Variant:
  """One way to run.

  Attributes:
    factors: what the study varies; the columns of its table.
    choice: what is chosen for each row by itself.
    changes: fields of the run's config, dotted, with their values.
  """

  factors: Mapping[str, Any]
  choice: Mapping[str, Any]
  changes: Mapping[str, Any]

  @property
  def row(self) -> str:
    """Name of the row that it belongs to."""
    return in_words(self.factors)

  @property
  def name(self) -> str:
    """What sets it apart from the other variants of the study."""
    return in_words({**self.factors, **self.choice})


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of a study: a variant with a seed.

  Attributes:
    run: the config of the run, as plain values.
  """

  variant: Variant
  seed: int
  run: Mapping[str, Any]

  @property
  def key(self) -> str:
    """Digest of all that decides its outcome."""
    described = json.dumps(self.run, sort_keys=True, default=list)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def default_study(name: str) -> Any:
  """A study without variants yet.

  Fields:
    name: it is kept in runs/lab/NAME, unless `workdir` says otherwise.
    run: config of the run that is varied; see `run_config.default_run`.
    seeds: each variant runs once with each.
    variants: see `add`.
    reference: factors of the row to which the others' losses are compared, as
      a dict; those named in `reference_by` are taken from the row itself.
    reference_by: factors by which rows and their reference go together.
    plot: what the plot shows: see `plots.save`.
    processes: runs at a time; 0 for one per core.
  """
  config: Any = ml_collections.ConfigDict(
    {
      'name': name,
      'workdir': f'runs/lab/{name}',
      'run': run_config.default_run(),
      'seeds': (0, 1, 2),
      'variants': (),
      'reference': ml_collections.ConfigDict(),
      'reference_by': (),
      'plot': {'x': '', 'y': 'loss', 'lines': '', 'panels': '', 'log_x': False},
      'processes': 0,
    }
  )
  config.lock()
  config.reference.unlock()
  return config


def add(
  config: Any,
  *,
  factors: Mapping[str, Any],
  changes: Mapping[str, Any],
  choice: Mapping[str, Any] | None = None,
) -> None:
  """Adds a variant to a study; see `Variant`."""
  variant = {
    'factors': dict(factors),
    'choice': dict(choice or {}),
    'changes': dict(changes),
  }
  config.variants = (*config.variants, variant)


def cells_of(config: Any) -> list[Cell]:
  """All runs of a study, seed by seed, so that early results span the rows.

  Raises:
    ValueError: if there are no variants or seeds, two variants are one, or a
      change names no field.
  """
  missing = {*default_study('')} - {*config}
  if missing:
    raise ValueError(
      f'the config of a study must have {", ".join(sorted(missing))}; begin '
      'get_config() with lab.study.default_study(NAME), as configs/lab/*.py do.'
    )
  variants = [Variant(**variant) for variant in config.variants]
  if not variants or not config.seeds:
    raise ValueError(
      f'A study needs variants and seeds, but {config.name!r} has '
      f'{len(variants)} and {len(config.seeds)}; add some with study.add.'
    )
  names = [variant.name for variant in variants]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(
        f'Two variants of {config.name!r} are named {name!r}; give what they '
        'differ in as factors or choice.'
      )
  return [
    Cell(variant, seed, _varied(config.run, variant, seed))
    for seed in config.seeds
    for variant in variants
  ]


def change(run: Any, changes: Mapping[str, Any]) -> None:
  """Sets fields of a run's config, named with dots.

  Raises:
    ValueError: if there is no such field.
  """
  for field, value in changes.items():
    *sections, last = field.split('.')
    section = run
    try:
      for name in sections:
        section = section[name]
      with section.ignore_type():
        section[last] = value
    except (KeyError, AttributeError, TypeError) as error:
      raise ValueError(
        f'{field!r} is no field of a run: {error.args[0]}'
      ) from error


def _varied(run: Any, variant: Variant, seed: int) -> dict[str, Any]:
  varied = copy.deepcopy(run)
  varied.seed = seed
  try:
    change(varied, variant.changes)
  except ValueError as error:
    raise ValueError(f'The variant {variant.name!r}: {error}') from error
  return varied.to_dict()
