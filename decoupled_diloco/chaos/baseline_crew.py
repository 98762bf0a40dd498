"""The processes of the synchronous baseline: all those of one generation."""

import dataclasses
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time

from decoupled_diloco.chaos.baseline_worker import WorkerFacts
from decoupled_diloco.runtime import processes


@dataclasses.dataclass(frozen=True)
class Crew:
  """All processes of one generation, and what the first one reports."""

  workers: list[subprocess.Popen]
  reports: processes.ReportPipe


def start(
  num_workers: int, facts: WorkerFacts, logs: pathlib.Path, *, pins_cores: bool
) -> Crew:
  """Starts a generation.

  Args:
    num_workers: processes.
    facts: what they are told; number, coordinator and time are filled in.
    logs: folder of what they print.
    pins_cores: whether each process stays on a core of its own (in turn).

  Raises:
    OSError: if a log cannot be written.
  """
  facts = dataclasses.replace(
    facts,
    coordinator=f'127.0.0.1:{_free_port()}',
    began_at=time.monotonic(),
  )
  crew = Crew([], processes.ReportPipe())
  try:
    for m in range(num_workers):
      crew.workers.append(
        processes.spawn(
          command(dataclasses.replace(facts, process=m)),
          logs / f'worker-{m}.log',
          core=processes.core_of(m) if pins_cores else None,
          report=crew.reports if m == 0 else None,
        )
      )
  except BaseException:
    for worker in crew.workers:
      processes.send(worker, signal.SIGKILL)
      worker.wait()
    crew.reports.close()
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


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]
