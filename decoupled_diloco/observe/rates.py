"""How fast a run goes lately, and how long it will take."""

from collections import deque
from typing import NamedTuple

from decoupled_diloco.observe import words
from decoupled_diloco.observe.run_status import RunStatus


class _Sample(NamedTuple):
  now: float
  rounds: int
  merged_tokens: float
  bytes_up: int
  bytes_down: int


class Rates(NamedTuple):
  """Rates over the last while; None where there is nothing to go by.

  Attributes:
    rounds_per_second: rounds merged.
    up_bytes_per_second, down_bytes_per_second: payloads, all learners together.
    left_seconds: until the budget is met.
  """

  rounds_per_second: float | None = None
  up_bytes_per_second: float | None = None
  down_bytes_per_second: float | None = None
  left_seconds: float | None = None


class RateMeter:
  """Rates over a sliding window of seconds."""

  def __init__(self, window_seconds: float):
    self._window_seconds = window_seconds
    self._samples: deque[_Sample] = deque()

  def measure(self, status: RunStatus, now: float) -> Rates:
    """The rates at this time.

    Args:
      status: of the run.
      now: at least `status.now`, on the same clock, and never less than before.
    """
    sample = _Sample(
      now,
      status.rounds_merged,
      status.merged_tokens,
      status.bytes_up,
      status.bytes_down,
    )
    samples = self._samples
    samples.append(sample)
    # The oldest that stays is the last one before the window.
    while len(samples) > 2 and samples[1].now <= now - self._window_seconds:
      samples.popleft()
    oldest = samples[0]
    seconds = now - oldest.now
    if seconds <= 0:
      return Rates()
    rounds = (sample.rounds - oldest.rounds) / seconds
    tokens = (sample.merged_tokens - oldest.merged_tokens) / seconds
    left = []
    if status.phase == words.RUNNING and status.budget_rounds and rounds > 0:
      rounds_left = status.budget_rounds - status.current_round
      left.append(max(rounds_left, 0) / rounds)
    if status.phase == words.RUNNING and status.budget_tokens and tokens > 0:
      tokens_left = status.budget_tokens - status.merged_tokens
      left.append(max(tokens_left, 0) / tokens)
    return Rates(
      rounds_per_second=rounds,
      up_bytes_per_second=(sample.bytes_up - oldest.bytes_up) / seconds,
      down_bytes_per_second=(sample.bytes_down - oldest.bytes_down) / seconds,
      left_seconds=min(left) if left else None,
    )
