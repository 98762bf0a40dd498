"""What both ends of a run must agree on before they exchange anything."""

import dataclasses
import hashlib
import json

from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.training.wire_format import WireOptions


def layout_digest(
  plan: FragmentPlan, schedule: ScheduleOptions, options: WireOptions
) -> str:
  """What must be equal at both ends for rounds and payloads to mean the same.

  Returns:
    Hexadecimal SHA-256 over the plan's digest, the schedule and the wire
    options.
  """
  described = json.dumps(
    [plan.digest, dataclasses.asdict(schedule), dataclasses.asdict(options)],
    sort_keys=True,
  )
  return hashlib.sha256(described.encode()).hexdigest()
