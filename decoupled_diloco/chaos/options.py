"""What a chaos experiment needs to know, and the config that says it."""

import dataclasses
from typing import Any

import ml_collections

from decoupled_diloco import configuring
from decoupled_diloco.chaos.schedule import FaultOptions
from decoupled_diloco.config_files import unknown_field
from decoupled_diloco.run_options import RunOptions

DECOUPLED = 'decoupled'
UNDISTURBED = 'undisturbed'
BASELINE = 'baseline'
PHASES = (DECOUPLED, UNDISTURBED, BASELINE)


@dataclasses.dataclass(frozen=True)
class BaselineOptions:
  """How the synchronous baseline is operated.

  Attributes:
    checkpoint_seconds: between two checkpoints; 0: what suits the measured
      cost of one and the mean time between failures (Young's rule).
    stall_seconds: how long a step may take before everything is started
      again.
  """

  checkpoint_seconds: float = 0.0
  stall_seconds: float = 10.0

  def __post_init__(self):
    if self.checkpoint_seconds < 0 or self.stall_seconds <= 0:
      raise ValueError(
        f'checkpoint_seconds={self.checkpoint_seconds} must not be negative '
        f'(0: by rule), and stall_seconds={self.stall_seconds} must be '
        'positive.'
      )


@dataclasses.dataclass(frozen=True)
class ChaosOptions:
  """A chaos experiment.

  Attributes:
    workdir: folder for its runs and its report.
    phases: which runs there are, in this order: 'decoupled' (with faults),
      'undisturbed' (the same without), 'baseline' (synchronous data
      parallelism with the same faults). Those that are finished in `workdir`
      are not run again, unless they were asked for otherwise then.
    slow_bytes_per_second: bandwidth of a link that is slow.
    faults: which strike.
    baseline: see there.
    run: options of the decoupled runs.
    learners: the same for each learner, with its own overrides.
  """

  workdir: str
  phases: tuple[str, ...]
  slow_bytes_per_second: float
  faults: FaultOptions
  baseline: BaselineOptions
  run: RunOptions
  learners: tuple[RunOptions, ...]

  def __post_init__(self):
    if not self.phases or set(self.phases) - {*PHASES}:
      raise ValueError(
        f'config.phases={self.phases} must be some of {", ".join(PHASES)}.'
      )
    if self.slow_bytes_per_second <= 0:
      raise ValueError(
        f'config.slow_bytes_per_second={self.slow_bytes_per_second} must be '
        'positive.'
      )
    try:
      self.faults.check_learners(self.run.membership.num_learners)
    except ValueError as error:
      raise ValueError(f'config.faults: {error}') from error
    if self.run.launch.kill:
      raise ValueError(
        f'config.run.launch.kill={self.run.launch.kill} must be empty: what is '
        'to happen is said by config.faults; for example '
        "config.faults.schedule=((30.0, 'kill', (0,), 0.0),)."
      )


def default_config() -> Any:
  """All fields with their defaults; `config.run` is that of a run."""
  config: Any = ml_collections.ConfigDict(
    {
      'workdir': 'runs/chaos',
      'phases': PHASES,
      'slow_bytes_per_second': 2e4,
      'faults': _fields(FaultOptions()),
      'baseline': _fields(BaselineOptions()),
    }
  )
  config.run = configuring.default_config()
  config.run.launch.max_restarts = 1_000_000
  config.lock()
  # What is left out does not occur.
  for name in ('weights', 'mean_seconds'):
    config.faults[name].unlock()
  config.run.learners.unlock()
  return config


def options_of(config: Any) -> ChaosOptions:
  """The options that a config describes.

  Raises:
    ValueError: with the field, the rule, the value and what to do.
  """
  try:
    run = config.run
    num_learners = run.membership.num_learners
    names = ('workdir', 'phases', 'slow_bytes_per_second')
    top = {name: config[name] for name in names}
    sections = {
      'faults': _section('faults', FaultOptions, config),
      'baseline': _section('baseline', BaselineOptions, config),
    }
  except (AttributeError, KeyError) as error:
    raise ValueError(
      f'a chaos config must have all fields ({error}); begin get_config() with '
      'chaos.options.default_config().'
    ) from error
  return ChaosOptions(
    **{**top, 'phases': tuple(top['phases'])},
    **sections,
    run=configuring.options_of(run),
    learners=tuple(configuring.options_of(run, m) for m in range(num_learners)),
  )


def _fields(options: Any) -> dict[str, Any]:
  return {
    field.name: getattr(options, field.name)
    for field in dataclasses.fields(options)
  }


def _section(name: str, kind: type, config: Any) -> Any:
  raw = config[name].to_dict()
  names = [field.name for field in dataclasses.fields(kind)]
  for field in raw:
    if field not in names:
      raise ValueError(unknown_field(f'config.{name}', field, names))
  try:
    return kind(**raw)
  except (ValueError, TypeError) as error:
    raise ValueError(f'config.{name}: {error}') from error
