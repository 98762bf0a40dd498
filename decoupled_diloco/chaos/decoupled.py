"""A decoupled run into which faults are injected, and what it came to."""

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from decoupled_diloco import auditing, local_run
from decoupled_diloco.chaos import outages as out
from decoupled_diloco.chaos.injector import Injector, Struck
from decoupled_diloco.chaos.memory import MemoryWatch
from decoupled_diloco.chaos.proxy import LinkProxies
from decoupled_diloco.chaos.result import ChaosResult
from decoupled_diloco.chaos.schedule import FREEZE, Fault
from decoupled_diloco.observe.summary import summarise
from decoupled_diloco.observe.tape import read_tape
from decoupled_diloco.run_options import RunOptions
from decoupled_diloco.runtime.launch_options import SYNCER
from decoupled_diloco.runtime.learner_fleet import End
from decoupled_diloco.transport.addresses import split_address

# Faults strike within this of their time, and are noticed as exactly.
_POLL_SECONDS = 0.05
_MEMORY_SECONDS = 1.0


class DisturbedRun:
  """A run on this machine that faults are injected into.

  Args:
    options: of the run; its role is 'local'.
    arguments: those of `train` that name its config.
    faults: in the order of their times, which count from the opening of round
      0; they end when the drain begins.
    slow_bytes_per_second: bandwidth of a link that is slow.

  Raises:
    ValueError: if the folder is not for this run.
  """

  def __init__(
    self,
    options: RunOptions,
    arguments: Sequence[str],
    faults: Iterator[Fault],
    slow_bytes_per_second: float,
  ):
    self._options = options
    self._arguments = arguments
    self.local = local_run.LocalRun(options, self._command)
    launcher = self.local.launcher
    self._links = LinkProxies(options.membership.num_learners, self._upstream)
    self._injector = Injector(
      faults,
      process=launcher.process,
      links=self._links,
      slow_bytes_per_second=slow_bytes_per_second,
      tell=self.local.watcher.tell,
    )
    self._memory = MemoryWatch(self._pids, _MEMORY_SECONDS)
    self._opened_at = 0.0  # On the clock of the memory's samples.
    self._drain_at: float | None = None

  def run(self) -> None:
    """Runs it to its end, whatever that is."""
    try:
      self.local.run(self._poll, _POLL_SECONDS)
    finally:
      self._links.close()

  def result(self) -> ChaosResult:
    """What it came to.

    Raises:
      ValueError: if it has not come to train.
      OSError: if its tape cannot be read.
    """
    local = self.local
    status = local.watcher.status
    if status is None or status.opened_at is None or not status.wall_seconds:
      raise ValueError(
        f'the run in {local.folder.root} has not come to train '
        f'({local.failure or "it was stopped"}); see {local.folder.logs}.'
      )
    tape = read_tape(local.folder.tape)
    found = out.outages(tape, self._injector.struck, status.opened_at)
    kills = [outage for outage in found if outage.kind != FREEZE]
    share = out.availability(
      found,
      len(status.learners),
      status.min_learners,
      status.wall_seconds,
    )
    summary = summarise(status)
    parts = [
      learner.participation
      for learner in summary.learners
      if learner.participation is not None
    ]
    audit = auditing.audit(tape)
    struck, result = self._injector.struck, local.result
    return ChaosResult(
      is_complete=result is not None and result.is_success,
      end_reason=result.reason if result else str(local.failure),
      held_out_loss=result.loss_end if result else None,
      merged_tokens=summary.merged_tokens,
      wall_seconds=summary.wall_seconds,
      goodput=summary.goodput,
      yield_=summary.yield_,
      participation=sum(parts) / len(parts) if parts else None,
      available=share.share,
      uptime=share.uptime,
      faults=dict(Counter(s.fault.kind for s in struck if s.is_effective)),
      faults_in_vain=sum(not s.is_effective for s in struck),
      detect_seconds=out.median_seconds(
        outage.detected_at - outage.began_at
        for outage in kills
        if outage.detected_at is not None
      ),
      rejoin_seconds=out.median_seconds(
        outage.ended_at - outage.began_at
        for outage in kills
        if outage.ended_at is not None
      ),
      crashes=crashes(local.launcher.ends, struck),
      lives=audit.num_lives,
      refusals=summary.refusals,
      memory_growth=self._growth(),
      problems=audit.problems,
    )

  def _command(
    self, role: str, learner: int, address: str, is_again: bool
  ) -> list[str]:
    if role == 'learner':
      address = self._links.address(learner)
    return local_run.command(
      self._arguments,
      self.local.folder,
      role,
      learner,
      address,
      is_again=is_again,
    )

  def _upstream(self) -> tuple[str, int]:
    return split_address(self.local.folder.address.read_text().strip())

  def _pids(self) -> dict[int | str, int]:
    whom = [SYNCER, *range(self._options.membership.num_learners)]
    found = {each: self.local.launcher.process(each) for each in whom}
    return {each: p.pid for each, p in found.items() if p is not None}

  def _poll(self) -> None:
    status, now = self.local.watcher.status, time.monotonic()
    if status is None or status.opened_at is None:
      return
    if not self._injector.has_begun:
      self._opened_at = now
      self._injector.begin()
    if status.drain_at is not None or status.ended_at is not None:
      self._drain_at = self._drain_at or now
      self._injector.finish()
      return
    self._injector.poll()
    self._memory.poll(now)

  def _growth(self) -> dict[str, float]:
    end = self._drain_at or time.monotonic()
    found = self._memory.growth(self._opened_at, end)
    return {str(whom): growth.share for whom, growth in found.items()}


def crashes(ends: Sequence[End], struck: Sequence[Struck]) -> list[str]:
  """Processes that ended by themselves, and not well, as sentences."""
  killed = {pid for each in struck for pid in each.pids}
  return [
    f'{"the syncer" if end.whom == SYNCER else f"learner {end.whom}"} ended '
    f'with {end.code}'
    for end in ends
    if end.code and not (end.pid in killed and end.code == -signal.SIGKILL)
  ]
