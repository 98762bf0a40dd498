"""A run on one machine as people meet it: launched, watched, summed up."""

import contextlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from rich.console import Console

from decoupled_diloco import entry, roles
from decoupled_diloco.configuring import RunOptions
from decoupled_diloco.observe.metrics import MetricsWriter
from decoupled_diloco.observe.progress import ProgressView
from decoupled_diloco.observe.run_status import RunStatus
from decoupled_diloco.observe.status import catch_up
from decoupled_diloco.observe.summary import OutsideFacts, summarise
from decoupled_diloco.observe.summary_text import render
from decoupled_diloco.observe.tape import TapeFollower
from decoupled_diloco.runtime.launch import Launcher

_POLL_SECONDS = 0.2
_METRICS_SECONDS = 1.0
# The file that says whose folder it is, from the first moment on.
_CLAIM = 'claimed'


class Watcher:
  """Follows the tape of a run: shows it, and notes its figures.

  Attributes:
    status: of the run; None before anything is known.
  """

  def __init__(self, workdir: pathlib.Path):
    self.tape = workdir / 'events.jsonl'
    self.metrics = workdir / 'metrics.jsonl'
    self.status: RunStatus | None = None
    self._follower = TapeFollower(self.tape)
    self._view = ProgressView(sys.stderr)
    self._metrics = MetricsWriter(self.metrics)
    self._noted_at = 0.0

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

  def poll(self) -> None:
    """Reads what is new on the tape, and shows it."""
    self.status = catch_up(self.status, self._follower)
    if self.status is None or self.status.began_at is None:
      return
    now = time.monotonic()
    self._view.update(self.status, now)
    if now - self._noted_at >= _METRICS_SECONDS:
      self._noted_at = now
      self._metrics.write(self.status)

  def tell(self, text: str) -> None:
    """Shows a sentence of the launcher's."""
    self._view.say(text)

  def close(self) -> None:
    """Shows and notes the last state."""
    self.status = catch_up(self.status, self._follower)
    if self.status is not None:
      self._view.update(self.status, time.monotonic())
      self._metrics.write(self.status)
    self._view.close()
    self._metrics.close()


def run(options: RunOptions, arguments: Sequence[str]) -> int:
  """Launches syncer and learners, watches them, shows what came out.

  Args:
    options: of the run.
    arguments: of this command, without the program's name; its processes get
      the same and their role.

  Returns:
    The exit code.

  Raises:
    SystemExit: if the run could not begin or go on, with a sentence.
  """
  workdir = pathlib.Path(options.workdir).resolve()
  with entry.setting_up():
    claim(options)
  watcher = Watcher(workdir)

  def command(role: str, learner: int, address: str) -> list[str]:
    changes = {'role': role, 'workdir': str(workdir)}
    if role == 'learner':
      changes |= {'learner': str(learner), 'syncer.address': address}
    return [
      sys.executable,
      '-m',
      'decoupled_diloco.train',
      *arguments,
      *(f'--config.{name}={value}' for name, value in changes.items()),
      '--launched',
    ]

  launcher = Launcher(
    options.launch,
    command=command,
    num_learners=options.membership.num_learners,
    workdir=workdir,
    progress=lambda: watcher.progress,
    tell=watcher.tell,
  )
  _stop_on_signals(launcher)
  print(
    f'Starting a syncer and {options.membership.num_learners} learners; what '
    f'they print goes to {workdir / "logs"}.',
    file=sys.stderr,
  )
  with entry.at_work():
    try:
      launcher.run(watcher.poll)
    finally:
      watcher.close()
      unclaim(workdir)
  result = roles.Result(**json.loads((workdir / 'result.json').read_text()))
  show_summary(watcher, result)
  return 0 if result.is_success else 1


@contextlib.contextmanager
def watching(options: RunOptions) -> Iterator[Watcher]:
  """Shows the run of this process on a thread of its own."""
  watcher = Watcher(pathlib.Path(options.workdir).resolve())
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


def show_summary(watcher: Watcher, result: roles.Result) -> None:
  """Prints what came out of a run, and keeps it in `summary.json`."""
  if watcher.status is None:
    return
  summary = summarise(
    watcher.status,
    OutsideFacts(
      held_out_loss_start=result.loss_start,
      held_out_loss_end=result.loss_end,
      checkpoint=result.checkpoint,
      tape=str(watcher.tape),
      metrics=str(watcher.metrics),
      sample=result.sample,
      end_reason=result.reason,
      is_failure=not result.is_success,
    ),
  )
  path = watcher.tape.with_name('summary.json')
  path.write_text(json.dumps(summary.to_jsonable(), indent=2) + '\n')
  Console(highlight=False).print(render(summary))


def claim(options: RunOptions) -> None:
  """Makes the folder of a run.

  Raises:
    ValueError: if it holds another run, or cannot be one.
    OSError: if it cannot be made.
  """
  if '://' in options.workdir:
    raise ValueError(
      f'config.workdir={options.workdir} must be a local folder: tapes and '
      'logs are appended to, which buckets cannot do.'
    )
  workdir = pathlib.Path(options.workdir).resolve()
  if (workdir / 'events.jsonl').exists():
    raise ValueError(
      f'config.workdir={workdir} holds a run already; choose another folder, '
      'or remove that one.'
    )
  if (workdir / 'checkpoint').exists():
    raise ValueError(
      f'config.workdir={workdir} holds a checkpoint already, which the run '
      'would have to replace; choose another folder.'
    )
  workdir.mkdir(parents=True, exist_ok=True)
  try:
    (workdir / _CLAIM).touch(exist_ok=False)
  except FileExistsError:
    raise ValueError(
      f'config.workdir={workdir} belongs to a run that is starting (or was '
      f'killed while it did: then remove {workdir / _CLAIM}); choose another '
      'folder.'
    ) from None


def unclaim(workdir: pathlib.Path) -> None:
  """Gives the folder of a run back that never began."""
  if not (workdir / 'events.jsonl').exists():
    (workdir / _CLAIM).unlink(missing_ok=True)


def _stop_on_signals(launcher: Launcher) -> None:
  seen = []

  def handle(number: int, frame: FrameType | None) -> None:
    del frame
    if seen:
      launcher.kill_all()
      raise SystemExit(128 + number)
    seen.append(number)
    # Not print, which the handler may have interrupted.
    os.write(2, b'\nStopping in order; once more to stop at once.\n')
    launcher.request_stop(number)

  signal.signal(signal.SIGINT, handle)
  signal.signal(signal.SIGTERM, handle)
