"""A cap on payload bytes, spread evenly over time."""

# How much may go at once, in seconds of the capped rate; and how much a chunk
# may take. In any second, no more than 1 + 2 * _SLACK_SECONDS of the cap is
# sent.
_SLACK_SECONDS = 0.05


class Shaper:
  """When the next payload bytes may go.

  Args:
    bytes_per_second: the cap; 0 for none.
    chunk_bytes: most payload bytes of a frame, without a cap.
  """

  def __init__(self, bytes_per_second: float, chunk_bytes: int):
    self._rate = bytes_per_second
    self._free_at = 0.0
    self.chunk_bytes = chunk_bytes
    if bytes_per_second:
      most = max(int(bytes_per_second * _SLACK_SECONDS), 1)
      self.chunk_bytes = min(chunk_bytes, most)

  def seconds_until_free(self, now: float) -> float:
    """How long the next chunk has to wait; 0 if not at all."""
    return max(self._free_at - now, 0.0)

  def on_sent(self, num_bytes: int, now: float) -> None:
    """A chunk was sent."""
    if self._rate:
      # What was not used is lost, but for a little.
      begin = max(self._free_at, now - _SLACK_SECONDS)
      self._free_at = begin + num_bytes / self._rate
