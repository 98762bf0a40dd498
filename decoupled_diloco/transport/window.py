"""How many payload bytes may be on their way: credit, given and earned."""

import collections

from decoupled_diloco.transport.wire import WireError


class CreditWindow:
  """The sender's account of payload bytes that are not acknowledged yet.

  What is on its way cannot be overtaken any more, wherever it waits: in gRPC,
  in the sockets, in the routers, in the receiver. So the window is what bounds
  the memory that a stalled receiver costs, and how long a heartbeat waits
  behind a payload. It grows while acknowledgements come within `delay_seconds`,
  and halves when one takes longer (as in delay-based congestion control, e.g.
  LEDBAT, RFC 6817), so that a slow link is not given more than it carries in
  that time.
  """

  def __init__(
    self, chunk_bytes: int, maximum_bytes: int, delay_seconds: float
  ):
    self._minimum = 2 * chunk_bytes
    self._maximum = maximum_bytes
    self._delay = delay_seconds
    self._size = min(2 * self._minimum, maximum_bytes)
    self._was_full = False
    # (total bytes sent up to the end of a chunk, when it was sent)
    self._under_way: collections.deque[tuple[int, float]] = collections.deque()
    self._last_progress = 0.0
    self._halved_until = 0
    self.sent = 0
    self.acknowledged = 0

  @property
  def size(self) -> int:
    """Most bytes on their way, for now."""
    return self._size

  @property
  def in_flight(self) -> int:
    """Bytes on their way."""
    return self.sent - self.acknowledged

  def has_room(self, num_bytes: int) -> bool:
    """Whether a chunk of this size may be sent."""
    if self.in_flight + num_bytes <= self._size:
      return True
    self._was_full = True
    return False

  def on_sent(self, num_bytes: int, now: float):
    """A chunk was sent."""
    if not self.in_flight:
      self._last_progress = now
    self.sent += num_bytes
    self._under_way.append((self.sent, now))

  def on_acknowledged(self, total: int, now: float):
    """The other side has taken in `total` bytes since the beginning.

    Raises:
      WireError: if that is more than was sent, or less than it said before.
    """
    if not self.acknowledged <= total <= self.sent:
      raise WireError(
        f'An acknowledgement of {total} bytes must be from '
        f'{self.acknowledged} to {self.sent}.'
      )
    if total == self.acknowledged:
      return
    newly = total - self.acknowledged
    self.acknowledged = total
    self._last_progress = now
    sent_at = now
    while self._under_way and self._under_way[0][0] <= total:
      _, sent_at = self._under_way.popleft()
    if now - sent_at > self._delay:
      # Once for all that was sent with the size that proved too large.
      if total > self._halved_until:
        self._size = max(self._size // 2, self._minimum)
        self._halved_until = self.sent
    elif self._was_full:
      self._size = min(self._size + newly, self._maximum)
    self._was_full = False

  def waiting_since(self) -> float | None:
    """Since when bytes are on their way with no progress; None if none are."""
    return self._last_progress if self.in_flight else None
