"""How a syncer keeps what it must not lose."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class DurabilityOptions:
  """How a syncer keeps what it must not lose.

  Attributes:
    snapshot_growth: a snapshot is taken when the journal has grown to so many
      times the size of one. More means less to write, and more to replay after
      a crash.
  """

  snapshot_growth: float = 4.0

  def __post_init__(self):
    if not self.snapshot_growth > 0:
      raise ValueError(
        f'snapshot_growth={self.snapshot_growth} must be positive; 4 writes a '
        'quarter more than the journal alone.'
      )
