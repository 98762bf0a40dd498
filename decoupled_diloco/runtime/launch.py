"""A whole run on one machine: start, watch and restart its processes.

`Launcher` starts one syncer and M learners as processes of their own, restarts
those that die, injects the kills that were asked for, and leaves no process
behind, however it ends itself.
"""

import dataclasses
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from decoupled_diloco.runtime import processes
from decoupled_diloco.runtime.launch_options import (
  EXIT_USAGE,
  SYNCER,
  LaunchError,
  LaunchOptions,
)
from decoupled_diloco.runtime.learner_fleet import End, LearnerFleet


@dataclasses.dataclass(frozen=True)
class _Stop:
  """The signal that asks for an end, and when it came."""

  number: int
  asked_at: float

  @property
  def exit_code(self) -> int:
    """Of the processes that it ends, and of this one."""
    return 128 + self.number

  def error(self) -> LaunchError:
    """What there is to say if nothing has begun."""
    name = signal.Signals(self.number).name
    return LaunchError(
      f'stopped by {name} before the run began.', self.exit_code
    )

  def has_ended(self, code: int) -> bool:
    """Whether a process with this exit code has ended because of it."""
    numbers = (self.number, signal.SIGTERM)
    return code in [end for n in numbers for end in (-n, 128 + n)]


class Launcher:
  """The processes of a local run.

  Args:
    options: see there.
    command: arguments of a process, given its role, the learner's number (-1
      for the syncer), the syncer's address ('' for the syncer's first process)
      and whether it goes on for one that has died.
    num_learners: M.
    workdir: where logs go, and where the syncer leaves its address in the file
      `address`.
    progress: the share of the run that is done.
    tell: is given sentences for people.
    hear: is given the lines that the syncer reports; one that begins with
      'error: ' is why it ends.
  """

  def __init__(
    self,
    options: LaunchOptions,
    *,
    command: Callable[[str, int, str, bool], Sequence[str]],
    num_learners: int,
    workdir: pathlib.Path,
    progress: Callable[[], float],
    tell: Callable[[str], None],
    hear: Callable[[str], None] = lambda line: None,
  ):
    self._options = options
    self._command = command
    self._num_learners = num_learners
    self._workdir = workdir
    self._tell = tell
    self._hear = hear
    self._syncer: subprocess.Popen | None = None
    self._syncer_error = ''
    self._syncer_restarts = 0
    self._syncer_ends: list[End] = []
    self._syncer_kills = [
      share for whom, share in options.kill if whom == SYNCER
    ]
    self._progress = progress
    self._report = processes.ReportPipe()
    self._address = ''
    self._has_begun = False
    self._stop: _Stop | None = None
    self._fleet = LearnerFleet(
      options,
      command=lambda m, is_again: command(
        'learner', m, self._address, is_again
      ),
      num_learners=num_learners,
      logs=workdir / 'logs',
      progress=progress,
      tell=tell,
    )

  def run(self, on_poll: Callable[[], None], poll_seconds: float = 0.1) -> None:
    """Starts everything and returns when the run has ended well.

    Args:
      on_poll: called all the time from this thread.
      poll_seconds: how often.

    Raises:
      LaunchError: if the syncer dies or has to be killed, if a learner may not
        take part, or if a stop was requested before the run began.
    """

    def poll() -> None:
      on_poll()
      for line in self._report.lines():
        if line.startswith('error: '):
          self._syncer_error = line.removeprefix('error: ')
        else:
          self._hear(line)

    try:
      syncer = self._start_syncer()
      self._wait_for_address(syncer, poll, poll_seconds)
      while True:
        while syncer.poll() is None:
          poll()
          self._fleet.watch(is_stopping=self._stop is not None)
          self._inject_kills(syncer)
          self._kill_late(syncer)
          time.sleep(poll_seconds)
        poll()
        self._syncer_ends.append(End(SYNCER, syncer.pid, syncer.returncode))
        if not self._may_restart(syncer.returncode):
          break
        syncer = self._restart_syncer(syncer.returncode)
      self._check_syncer(syncer)
      self._wait_for_learners(poll, poll_seconds)
    finally:
      self._end_all()
      self._report.close()

  @property
  def ends(self) -> list[End]:
    """How the processes that have ended did so."""
    return self._syncer_ends + self._fleet.ends

  def process(self, whom: int | str) -> subprocess.Popen | None:
    """The process of a learner, or the syncer's; None if it is not running."""
    if whom != SYNCER:
      return self._fleet.process(int(whom))
    syncer = self._syncer
    return syncer if syncer is not None and syncer.poll() is None else None

  def request_stop(self, number: int = signal.SIGTERM) -> None:
    """Asks the syncer to drain and end; may be called from a signal handler.

    Args:
      number: the signal that it is to get.
    """
    self._stop = _Stop(number, time.monotonic())
    self._pass_on(self._stop)

  def kill_all(self) -> None:
    """Ends everything at once."""
    for process in self._processes():
      processes.send(process, signal.SIGKILL)

  def _pass_on(self, stop: _Stop) -> None:
    """Lets the syncer know that it should end."""
    if self._syncer is not None:
      # Python could take a SIGINT for a mistake in what it is importing.
      is_early = not self._has_begun
      processes.send(self._syncer, signal.SIGTERM if is_early else stop.number)

  def _start_syncer(self) -> subprocess.Popen:
    (self._workdir / 'address').unlink(missing_ok=True)
    if self._stop is not None:
      raise self._stop.error()
    self._syncer = processes.spawn(
      self._command('syncer', -1, self._address, self._syncer_restarts > 0),
      self._log(),
      report=self._report,
    )
    if self._stop is not None:  # It came while nobody could be told.
      self._pass_on(self._stop)
    return self._syncer

  def _may_restart(self, code: int) -> bool:
    """Whether a syncer that has ended so is to be started again.

    One that says itself why it cannot go on would say so again.
    """
    return (
      code < 0
      and self._stop is None
      and self._syncer_restarts < self._options.max_restarts
    )

  def _restart_syncer(self, code: int) -> subprocess.Popen:
    """Starts the syncer again where it was; learners train meanwhile."""
    self._syncer_restarts += 1
    self._tell(
      f'the syncer is dead ({processes.describe(code)}); it starts again'
    )
    self._report.close()
    self._report = processes.ReportPipe()
    return self._start_syncer()

  def _inject_kills(self, syncer: subprocess.Popen) -> None:
    self._fleet.inject_kills()
    done = self._progress()
    for share in [s for s in self._syncer_kills if done >= s]:
      self._syncer_kills.remove(share)
      self._tell(f'killing the syncer (SIGKILL) at {done:.0%} of the run')
      processes.send(syncer, signal.SIGKILL)

  def _wait_for_address(
    self,
    syncer: subprocess.Popen,
    poll: Callable[[], None],
    poll_seconds: float,
  ) -> None:
    """Waits until the syncer listens, and starts the learners then."""
    path = self._workdir / 'address'
    deadline = time.monotonic() + self._options.start_seconds
    while not path.exists():
      if syncer.poll() is not None:
        poll()
        self._check_syncer(syncer)
        raise LaunchError('The syncer left before it listened.')
      if time.monotonic() > deadline:
        raise LaunchError(
          f'The syncer has not listened within start_seconds='
          f'{self._options.start_seconds:g}; see {self._log()}.'
        )
      self._kill_late(syncer)
      poll()
      time.sleep(poll_seconds)
    self._has_begun = True
    self._address = path.read_text().strip()
    if self._stop is None:
      self._tell(f'Starting {self._num_learners} learners.')
      self._fleet.start()

  def _log(self) -> pathlib.Path:
    return self._workdir / 'logs' / 'syncer.log'

  def _kill_late(self, syncer: subprocess.Popen) -> None:
    """Ends a syncer that does not end when it should."""
    # The learners need some of the time, too.
    seconds = self._options.stop_seconds * 0.7
    if self._stop is None or time.monotonic() < self._stop.asked_at + seconds:
      return
    processes.send(syncer, signal.SIGKILL)
    syncer.wait()
    raise LaunchError(
      f'The syncer has not ended within stop_seconds='
      f'{self._options.stop_seconds:g} and was killed; give it more to let it '
      f'finish what it does, or see {self._log()}.',
      self._stop.exit_code,
    )

  def _check_syncer(self, syncer: subprocess.Popen) -> None:
    code = syncer.returncode
    log = self._log()
    said = self._syncer_error or processes.last_line(log) or f'see {log}.'
    if self._stop is not None and self._stop.has_ended(code):
      raise self._stop.error()
    if code == EXIT_USAGE:
      raise LaunchError(said, EXIT_USAGE)
    if code and self._syncer_error:
      raise LaunchError(said)
    if code:
      raise LaunchError(
        f'The syncer has ended ({processes.describe(code)}): {said}'
      )

  def _wait_for_learners(
    self, poll: Callable[[], None], poll_seconds: float
  ) -> None:
    deadline = time.monotonic() + self._patience
    while time.monotonic() < deadline and any(
      process.poll() is None for process in self._fleet.processes
    ):
      poll()
      time.sleep(poll_seconds)

  @property
  def _patience(self) -> float:
    """How long learners may take to leave: less if somebody waits for it."""
    seconds = self._options.stop_seconds
    return seconds / 10 if self._stop else seconds

  def _processes(self) -> list[subprocess.Popen]:
    found = self._fleet.processes
    if self._syncer is not None:
      found.append(self._syncer)
    return found

  def _end_all(self) -> None:
    for process in self._processes():
      processes.send(process, signal.SIGTERM)
    deadline = time.monotonic() + self._patience
    for process in self._processes():
      try:
        process.wait(max(deadline - time.monotonic(), 0.0))
      except subprocess.TimeoutExpired:
        processes.send(process, signal.SIGKILL)
        process.wait()
