"""The processes of the synchronous baseline: started, or waiting in reserve."""

import contextlib
import dataclasses
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from decoupled_diloco.chaos.baseline_worker import Go, WorkerFacts
from decoupled_diloco.runtime import processes


@dataclasses.dataclass(frozen=True)
class Crew:
  """All processes of one generation, and what the first one reports."""

  workers: list[subprocess.Popen]
  reports: processes.ReportPipe


class Crews:
  """Starts one crew after the other.

  Args:
    num_workers: processes of each.
    facts: what a worker is told, by its number.
    logs: folder of what they print.
    has_standby: whether the next crew is started ahead, to load its code while
      the present one trains.
    pins_cores: whether each process stays on a core of its own (in turn).
  """

  def __init__(
    self,
    num_workers: int,
    facts: Callable[[int], WorkerFacts],
    logs: pathlib.Path,
    *,
    has_standby: bool,
    pins_cores: bool,
  ):
    self._num_workers = num_workers
    self._facts = facts
    self._logs = logs
    self._has_standby = has_standby
    self._pins_cores = pins_cores
    self._standby: Crew | None = None

  def start(self) -> Crew:
    """A crew that begins now.

    Raises:
      OSError: if a log cannot be written.
    """
    began_at = time.monotonic()
    crew, self._standby = self._standby or self._spawn(), None
    go = Go(f'127.0.0.1:{_free_port()}', began_at)
    for worker in crew.workers:
      assert worker.stdin is not None
      # One that has died is noticed like any other.
      with contextlib.suppress(BrokenPipeError), worker.stdin as stdin:
        stdin.write(json.dumps(dataclasses.asdict(go)).encode() + b'\n')
    return crew

  def prepare(self) -> None:
    """Has the next crew load its code, if there is to be a standby."""
    if self._has_standby and self._standby is None:
      self._standby = self._spawn()

  def close(self) -> None:
    """Ends those in reserve; the others belong to whoever has started them."""
    crew, self._standby = self._standby, None
    if crew is not None:
      _end(crew)

  def _spawn(self) -> Crew:
    crew = Crew([], processes.ReportPipe())
    try:
      for m in range(self._num_workers):
        crew.workers.append(
          processes.spawn(
            command(self._facts(m)),
            self._logs / f'worker-{m}.log',
            core=processes.core_of(m) if self._pins_cores else None,
            report=crew.reports if m == 0 else None,
            has_stdin=True,
          )
        )
    except BaseException:
      _end(crew)
      raise
    return crew


def command(facts: WorkerFacts) -> list[str]:
  """The command line of a worker."""
  return [
    sys.executable,
    '-m',
    'decoupled_diloco.chaos.baseline_worker',
    json.dumps(dataclasses.asdict(facts)),
  ]


def _end(crew: Crew) -> None:
  for worker in crew.workers:
    processes.send(worker, signal.SIGKILL)
  for worker in crew.workers:
    worker.wait()
    if worker.stdin is not None:
      worker.stdin.close()
  crew.reports.close()


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]
