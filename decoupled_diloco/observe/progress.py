"""A run as people watch it: a live table, or lines for a log file."""

import dataclasses
import sys
from typing import IO, Protocol, TextIO

from rich.console import Console
from rich.live import Live

from decoupled_diloco.observe import lines, words
from decoupled_diloco.observe.rates import RateMeter, Rates
from decoupled_diloco.observe.run_status import RunStatus
from decoupled_diloco.observe.screen import Screen


@dataclasses.dataclass(frozen=True, slots=True)
class ProgressOptions:
  """How a run is shown while it lasts.

  Attributes:
    style: 'live' (a table that is drawn anew), 'lines', or 'auto': live if the
      stream is a terminal that can.
    live_seconds: time between two pictures of the live table.
    line_seconds: time between two lines.
    window_seconds: rates are those of so much time.
    max_happenings: how many of the last happenings stay below the table.
  """

  style: str = 'auto'
  live_seconds: float = 0.5
  line_seconds: float = 10.0
  window_seconds: float = 30.0
  max_happenings: int = 5

  def __post_init__(self):
    if self.style not in ('auto', 'live', 'lines'):
      raise ValueError(
        f"style={self.style!r} must be 'auto', 'live' or 'lines'."
      )
    for name in ('live_seconds', 'line_seconds', 'window_seconds'):
      if getattr(self, name) <= 0:
        raise ValueError(f'{name}={getattr(self, name)} must be positive.')
    if self.max_happenings < 0:
      raise ValueError(
        f'max_happenings={self.max_happenings} must not be negative.'
      )


class ProgressView:
  """Shows a run on a stream. Needs no thread and has no clock.

  >>> view = ProgressView(sys.stderr)  # doctest: +SKIP
  >>> view.update(status, now)  # as often as you like  # doctest: +SKIP
  >>> view.close()  # doctest: +SKIP
  """

  def __init__(
    self,
    stream: TextIO | None = None,
    options: ProgressOptions | None = None,
  ):
    """Shows nothing yet.

    Args:
      stream: where to; standard error by default.
      options: how.
    """
    self._options = options or ProgressOptions()
    stream = stream or sys.stderr
    console = Console(file=stream, highlight=False)
    style = self._options.style
    is_live = style == 'live' or (
      style == 'auto' and console.is_terminal and not console.is_dumb_terminal
    )
    self._painter: _Painter = (
      _LivePainter(console, self._options)
      if is_live
      else _LinePainter(console.file, self._options)
    )
    self._meter = RateMeter(self._options.window_seconds)
    self._status: RunStatus | None = None
    self._status_now = self._heard_at = self._run_now = 0.0
    self._due_at: float | None = None
    self._is_closed = False

  def update(self, status: RunStatus, now: float) -> None:
    """Shows the status, if it is time to.

    Args:
      status: of the run.
      now: seconds on any clock that runs on, not necessarily the tape's.
    """
    if self._is_closed:
      return
    if self._status is None or status.now > self._status_now:
      self._status_now, self._heard_at = status.now, now
    self._status = status
    # Time goes on when nothing happens.
    silence = (
      0.0 if status.phase == words.FINISHED else max(now - self._heard_at, 0)
    )
    self._run_now = max(self._run_now, status.now + silence)
    self._painter.tell(status)
    if self._due_at is None or now >= self._due_at:
      self._due_at = now + self._painter.seconds
      self._paint(status)

  def skip(self, status: RunStatus) -> None:
    """Takes what has happened until now for known."""
    self._painter.skip(status)

  def say(self, text: str) -> None:
    """Shows a sentence that is not about what is on the tape, once."""
    self._painter.say(text)

  def close(self) -> None:
    """Shows the last status once more, and lets go of the terminal."""
    if self._is_closed:
      return
    self._is_closed = True
    try:
      if self._status is not None:
        self._paint(self._status)
    finally:
      self._painter.close()

  def _paint(self, status: RunStatus) -> None:
    rates = self._meter.measure(status, self._run_now)
    self._painter.paint(status, rates, self._run_now)


class _Painter(Protocol):
  """Puts a status on a stream."""

  seconds: float  # Time between two pictures.

  def tell(self, status: RunStatus) -> None:
    """Says at once what should be said at once."""

  def skip(self, status: RunStatus) -> None:
    """What has happened need not be said any more."""

  def say(self, text: str) -> None:
    """Says something else."""

  def paint(self, status: RunStatus, rates: Rates, now: float) -> None:
    """Shows the whole status."""

  def close(self) -> None:
    """Lets go of the stream."""


class _LivePainter:
  def __init__(self, console: Console, options: ProgressOptions):
    self.seconds = options.live_seconds
    self._max_happenings = options.max_happenings
    # Without a thread of its own: a picture is drawn when it is given.
    self._live = Live(console=console, auto_refresh=False)
    self._live.start()

  def tell(self, status: RunStatus) -> None:
    """Happenings are a part of the picture."""

  def skip(self, status: RunStatus) -> None:
    """The picture shows the last ones anyway."""

  def say(self, text: str) -> None:
    self._live.console.print(text)  # Above the picture.

  def paint(self, status: RunStatus, rates: Rates, now: float) -> None:
    screen = Screen(status, rates, now, self._max_happenings)
    self._live.update(screen, refresh=True)

  def close(self) -> None:
    self._live.stop()


class _LinePainter:
  def __init__(self, stream: IO[str], options: ProgressOptions):
    self.seconds = options.line_seconds
    self._stream = stream
    self._told = 0
    self._last = ''

  def tell(self, status: RunStatus) -> None:
    for happening in status.happenings:
      if happening.number >= self._told:
        self._write(lines.happening_line(status, happening))
    self.skip(status)

  def skip(self, status: RunStatus) -> None:
    self._told = status.happenings_count

  def say(self, text: str) -> None:
    self._write(text)

  def paint(self, status: RunStatus, rates: Rates, now: float) -> None:
    line = lines.progress_line(status, rates, now)
    if line != self._last:  # What has ended is said once.
      self._write(line)
    self._last = line

  def close(self) -> None:
    self._stream.flush()

  def _write(self, line: str) -> None:
    self._stream.write(line + '\n')
    self._stream.flush()
