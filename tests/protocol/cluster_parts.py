"""What the clusters of tests are made of."""

from typing import Any

from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.quorum import QuorumOptions
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.syncer_state import (
  BudgetOptions,
  SyncerOptions,
)
from decoupled_diloco.protocol.weights import StalenessOptions

TOKENS_PER_STEP = 100
PAYLOAD_BYTES = 8


def syncer_options(
  M: int = 2,
  k_min: int = 1,
  H: int = 6,
  P: int = 6,
  rounds: int = 10,
  **overrides,
) -> SyncerOptions:
  """Options for tests: no silence is ever too long unless a test says so."""
  options: dict[str, Any] = {
    'run_id': 'run',
    'layout': 'layout',
    'schedule': ScheduleOptions(sync_every=H, num_fragments=P),
    'membership': MembershipOptions(
      num_learners=M, heartbeat_seconds=1.0, liveness_timeout_seconds=1e6
    ),
    'quorum': QuorumOptions(min_learners=k_min),
    'grace': GraceOptions(),
    'staleness': StalenessOptions(),
    'budget': BudgetOptions(rounds=rounds),
    'max_rounds_in_flight': 4,
  }
  return SyncerOptions(**(options | overrides))
