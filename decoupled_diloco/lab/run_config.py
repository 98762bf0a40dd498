"""From the config of a run to a virtual cluster, and to its figures.

The config has the sections of a real run (`configuring.default_config`) with
the same meaning, so that what was found here can be copied there; and sections
for what is real there and made up here: `speed` and `link` of the learners,
`failures`, and `cluster` with all the rest. The sections of a real run that
concern processes and networks (transport, security, launch, ...) are ignored.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import ml_collections

from decoupled_diloco import building, configuring
from decoupled_diloco.configuring import RunOptions
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.quorum import QuorumOptions
from decoupled_diloco.protocol.syncer_state import SyncerOptions
from decoupled_diloco.simulate.options import (
  FailureOptions,
  Fault,
  LinkOptions,
  SpeedOptions,
)
from decoupled_diloco.training import inner
from decoupled_diloco.virtual.setup import (
  LearnerSetup,
  VirtualSetup,
  held_out,
)

MODES = ('decoupled', 'streaming', 'diloco', 'data_parallel')
_PER_LEARNER = ('speed', 'link')


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
  """What a run on a virtual clock has beside that of a real one.

  Attributes:
    mode: 'decoupled'; 'streaming' (all learners take part in every round and
      wait for it); 'diloco' (the same, with one fragment); 'data_parallel' (an
      exact all-reduce in every step).
    evaluate_every_rounds, merge_seconds, detection_seconds,
      snapshot_every_scans: as in `VirtualSetup`.
    max_seconds: virtual time at which the run is asked to end; 0: none.
  """

  mode: str = 'decoupled'
  evaluate_every_rounds: int = 0
  merge_seconds: float = 0.0
  detection_seconds: float = 0.0
  snapshot_every_scans: int = 0
  max_seconds: float = 0.0

  def __post_init__(self):
    if self.mode not in MODES:
      raise ValueError(
        f'mode={self.mode!r} must be one of {", ".join(map(repr, MODES))}.'
      )
    if self.max_seconds < 0:
      raise ValueError(
        f'max_seconds={self.max_seconds} must not be negative; 0: no limit.'
      )


_SECTIONS: Mapping[str, type] = {
  'speed': SpeedOptions,
  'link': LinkOptions,
  'failures': FailureOptions,
  'cluster': ClusterOptions,
}


class LabOptions(NamedTuple):
  """All options of a run on a virtual clock.

  Attributes:
    run: of a real run; those that a mode fixes are set as it does.
    learners: the same for each learner, with its own overrides.
    speeds, links: of each learner.
  """

  run: RunOptions
  learners: tuple[RunOptions, ...]
  speeds: tuple[SpeedOptions, ...]
  links: tuple[LinkOptions, ...]
  failures: FailureOptions
  cluster: ClusterOptions


def default_run() -> Any:
  """The config of a run, with all defaults.

  `config.learners = {'1': {'speed': {'step_seconds': 1.2}}}` overrides fields
  of a learner, as in the config of a real run. `failures.schedule` holds
  faults as tuples: (at, learner, kind, seconds).
  """
  config: Any = configuring.default_config()
  with config.unlocked():
    for name, section in _SECTIONS.items():
      config[name] = ml_collections.ConfigDict(
        {field.name: field.default for field in dataclasses.fields(section)}
      )
  return config


def options_of(run: Mapping[str, Any]) -> LabOptions:
  """The options that a config describes.

  Args:
    run: a config from `default_run`, as plain values.

  Raises:
    ValueError: with the field, the rule, the value and what to do.
  """
  missing = {*_SECTIONS, 'learners'} - run.keys()
  if missing:
    raise ValueError(
      "a run's config must have all sections, and "
      f'{", ".join(sorted(missing))} are missing; begin with '
      'lab.run_config.default_run().'
    )
  raw = {name: value for name, value in run.items() if name not in _SECTIONS}
  own = {
    learner: {name: fields for name, fields in changes.items()}
    for learner, changes in raw['learners'].items()
  }
  made_up = {
    learner: {name: changes.pop(name, {}) for name in _PER_LEARNER}
    for learner, changes in own.items()
  }
  raw['learners'] = own
  cluster: ClusterOptions = _section('cluster', run['cluster'])
  config: Any = ml_collections.ConfigDict(raw)
  M = configuring.options_of(config).membership.num_learners

  def each(name: str) -> tuple[Any, ...]:
    return tuple(
      _section(name, {**run[name], **made_up.get(str(m), {}).get(name, {})})
      for m in range(M)
    )

  failures = {
    **run['failures'],
    'schedule': tuple(
      Fault(*fault) for fault in run['failures'].get('schedule', ())
    ),
  }
  return LabOptions(
    run=_with_mode(configuring.options_of(config), cluster.mode),
    learners=tuple(configuring.options_of(config, m) for m in range(M)),
    speeds=each('speed'),
    links=each('link'),
    failures=_section('failures', failures),
    cluster=cluster,
  )


def _section(name: str, fields: Mapping[str, Any]) -> Any:
  try:
    return _SECTIONS[name](**fields)
  except (ValueError, TypeError) as error:
    raise ValueError(f'config.run.{name}: {error}') from error


def _with_mode(options: RunOptions, mode: str) -> RunOptions:
  """The options with what a mode fixes."""
  if mode == 'diloco' and options.schedule.num_fragments != 1:
    raise ValueError(
      "config.run.cluster.mode='diloco' needs schedule.num_fragments=1, not "
      f"{options.schedule.num_fragments}; or use 'streaming'."
    )
  if mode not in ('streaming', 'diloco'):
    return options
  return dataclasses.replace(
    options,
    quorum=QuorumOptions(min_learners=options.membership.num_learners),
    grace=GraceOptions(cap_seconds=math.inf),
    lead=dataclasses.replace(
      options.lead, max_rounds_in_flight=0, on_lead_limit='wait'
    ),
  )


def setup_of(options: LabOptions) -> VirtualSetup:
  """A cluster, ready to run.

  Raises:
    ValueError: if the options do not fit the model or the data.
  """
  run = building.fitted_to_data(options.run)
  task = building.build_task(run)
  batches = building.held_out(run)
  return VirtualSetup(
    task=task,
    plan=building.build_plan(run, task),
    inner=inner.inner_optimizer(run.inner),
    learning_rate=lambda step, rejoin: inner.learning_rate(
      run.inner, step, rejoin
    ),
    learners=tuple(
      LearnerSetup(_batches(own, m), speed, link)
      for m, (own, speed, link) in enumerate(
        zip(options.learners, options.speeds, options.links, strict=True)
      )
    ),
    syncer=SyncerOptions(
      run_id='virtual',
      layout='virtual',
      schedule=run.schedule,
      membership=run.membership,
      quorum=run.quorum,
      grace=run.grace,
      staleness=run.staleness,
      budget=run.budget,
      max_rounds_in_flight=run.lead.max_rounds_in_flight,
    ),
    on_lead_limit=run.lead.on_lead_limit,  # pyright: ignore
    wire=run.wire,
    adopt=run.adopt,
    outer=run.outer,
    failures=options.failures,
    merge_seconds=options.cluster.merge_seconds,
    detection_seconds=options.cluster.detection_seconds,
    evaluate=None if batches is None else held_out(task, _unstacked(batches)),
    evaluate_every_rounds=options.cluster.evaluate_every_rounds,
    snapshot_every_scans=options.cluster.snapshot_every_scans,
    max_seconds=options.cluster.max_seconds or math.inf,
    seed=run.seed,
  )


def _batches(options: RunOptions, learner: int) -> Any:
  own = dataclasses.replace(options, learner=learner)
  return building.open_pipeline(own).scan_batches


def _unstacked(batches: Any) -> list[Any]:
  leaves, structure = jax.tree.flatten(batches)
  return [structure.unflatten(each) for each in zip(*leaves, strict=True)]
