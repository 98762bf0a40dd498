"""A run as people meet it: shown while it lasts, summed up at its end."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console

from decoupled_diloco.observe.metrics import MetricsWriter
from decoupled_diloco.observe.progress import ProgressView
from decoupled_diloco.observe.run_status import RunStatus
from decoupled_diloco.observe.status import catch_up
from decoupled_diloco.observe.summary import OutsideFacts, summarise
from decoupled_diloco.observe.summary_text import render
from decoupled_diloco.observe.tape import TapeFollower
from decoupled_diloco.run_folder import RunFolder, write_whole
from decoupled_diloco.run_result import Result

_POLL_SECONDS = 0.2
_METRICS_SECONDS = 1.0


class Watcher:
  """Follows the tape of a run: shows it, and notes its figures.

  Attributes:
    folder: of the run.
    status: of the run; None before anything is known.
  """

  def __init__(self, folder: RunFolder):
    """Begins where the tape ends now.

    Raises:
      ValueError: if the tape that is there is damaged.
    """
    self.folder = folder
    self._follower = TapeFollower(folder.tape)
    self._view = ProgressView(sys.stderr)
    self._metrics: MetricsWriter | None = MetricsWriter(folder.metrics)
    self._noted_at = 0.0
    self.status: RunStatus | None = catch_up(None, self._follower)
    self._old_segments = 0
    if self.status is not None and self.status.began_at is not None:
      # Of a run that is continued, only what is new is shown.
      self._old_segments = self.status.segment + 1
      self._view.skip(self.status)

  @property
  def progress(self) -> float:
    """The share of the budget that is done."""
    if self.status is None:
      return 0.0
    shares = [0.0]
    if self.status.budget_rounds:
      shares.append(self.status.current_round / self.status.budget_rounds)
    if self.status.budget_tokens:
      shares.append(self.status.merged_tokens / self.status.budget_tokens)
    return max(shares)

  @property
  def has_begun(self) -> bool:
    """Whether the run has come to train."""
    return self._news is not None and self._news.opened_at is not None

  @property
  def _news(self) -> RunStatus | None:
    """The status, if there is more than the tape had told at the start."""
    status = self.status
    if status is None or status.began_at is None:
      return None
    return status if status.segment >= self._old_segments else None

  def poll(self) -> None:
    """Reads what is new on the tape, and shows it."""
    self.status = catch_up(self.status, self._follower)
    if self._news is None:
      return
    now = time.monotonic()
    self._view.update(self._news, now)
    if now - self._noted_at >= _METRICS_SECONDS:
      self._noted_at = now
      self._note()

  def tell(self, text: str) -> None:
    """Shows a sentence that is not about what is on the tape."""
    self._view.say(text)

  def close(self) -> None:
    """Shows and notes the last state."""
    self.status = catch_up(self.status, self._follower)
    if self._news is not None:
      self._view.update(self._news, time.monotonic())
      self._note()
    self._view.close()
    if self._metrics is not None:
      self._metrics.close()

  def _note(self) -> None:
    if self._metrics is None or self.status is None:
      return
    try:
      self._metrics.write(self.status)
    except OSError as error:
      # Whoever watches a run must not end it.
      self.tell(f'No more metrics are written: {error.strerror}.')
      self._metrics.close()
      self._metrics = None


@contextlib.contextmanager
def watching(folder: RunFolder) -> Iterator[Watcher]:
  """Shows the run of this process on a thread of its own."""
  watcher = Watcher(folder)
  is_over = threading.Event()

  def watch() -> None:
    while not is_over.wait(_POLL_SECONDS):
      watcher.poll()

  thread = threading.Thread(target=watch, daemon=True)
  thread.start()
  try:
    yield watcher
  finally:
    is_over.set()
    thread.join()
    watcher.close()


def show_summary(watcher: Watcher, result: Result | None) -> None:
  """Prints what came out of a run, and keeps it in `summary.json`.

  Args:
    watcher: of the run.
    result: how it ended; None if it was broken off.
  """
  if watcher.status is None:
    return
  folder = watcher.folder
  facts = OutsideFacts(
    tape=str(folder.tape), metrics=str(folder.metrics), is_failure=True
  )
  if result is not None:
    facts = OutsideFacts(
      held_out_loss_start=result.loss_start,
      held_out_loss_end=result.loss_end,
      checkpoint=result.checkpoint,
      tape=str(folder.tape),
      metrics=str(folder.metrics),
      sample=result.sample,
      end_reason=result.reason,
      is_failure=not result.is_success,
    )
  summary = summarise(watcher.status, facts)
  Console(highlight=False).print(render(summary))
  text = json.dumps(summary.to_jsonable(), indent=2) + '\n'
  try:
    write_whole(folder.summary, text)
  except OSError as error:
    # It has been shown, at least.
    print(f'The summary is not kept: {error}', file=sys.stderr)
