"""How a local run treats its processes, and how it says that it must end."""

import dataclasses
from typing import Any

# The exit code with which a process says that starting it again cannot help: a
# bad configuration, or a rejection.
EXIT_USAGE = 2
# Whom a fault befalls, if it is no learner.
SYNCER = 'syncer'


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
  """How a local run treats its processes.

  Attributes:
    pin_cores: whether each learner stays on a core of its own (in turn). It
      raises the throughput of several learners on few cores a lot.
    restart_seconds: pause before a dead learner is started again.
    max_restarts: of one learner; after that the run goes on without it. As
      often the syncer is started again when it was killed.
    start_seconds: how long the syncer may take to listen.
    stop_seconds: how long everything may take to end in order when it should,
      the final checkpoint included; what is left then is killed.
    kill: faults to inject, as ((learner, share of the run), ...): each learner,
      or 'syncer', is killed with SIGKILL when that share of the run is done.
  """

  pin_cores: bool = True
  restart_seconds: float = 1.0
  max_restarts: int = 3
  start_seconds: float = 120.0
  stop_seconds: float = 10.0
  kill: tuple[tuple[int | str, float], ...] = ()

  def __post_init__(self):
    object.__setattr__(self, 'kill', _as_kills(self.kill))
    for name in ('restart_seconds', 'max_restarts'):
      if getattr(self, name) < 0:
        raise ValueError(f'{name}={getattr(self, name)} must not be negative.')
    for name in ('start_seconds', 'stop_seconds'):
      if getattr(self, name) <= 0:
        raise ValueError(f'{name}={getattr(self, name)} must be positive.')


def _as_kills(value: Any) -> tuple[tuple[int | str, float], ...]:
  """Faults to inject, from whatever a config gives."""
  rule = (
    f"kill={value!r} must be pairs of a learner, or 'syncer', and a share of "
    'the run between 0 and 1; for example ((2, 0.4),).'
  )
  if not isinstance(value, tuple | list):
    raise ValueError(rule)
  kills: list[tuple[int | str, float]] = []
  for pair in value:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
      raise ValueError(rule)
    try:
      whom = SYNCER if pair[0] == SYNCER else int(pair[0])
      share = float(pair[1])
      if whom != SYNCER and whom != float(pair[0]):
        raise ValueError(rule)
    except (TypeError, ValueError):
      raise ValueError(rule) from None
    if not 0 < share < 1:
      raise ValueError(rule)
    kills.append((whom, share))
  return tuple(kills)


class LaunchError(RuntimeError):
  """The run cannot go on; the message says why and where to look.

  Attributes:
    exit_code: `EXIT_USAGE` if a process could not begin as it was asked to.
  """

  def __init__(self, message: str, exit_code: int = 1):
    super().__init__(message)
    self.exit_code = exit_code
