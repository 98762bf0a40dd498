"""The status of a run: a fold over the syncer's events and their effects.

  status = init(header)
  for event, effects in steps:
    update(status, event, effects)

No clock and no I/O: the same tape always gives the same status. The status is
updated in place.
"""

from collections.abc import Sequence

from decoupled_diloco.observe import bookkeeping, words
from decoupled_diloco.observe.run_status import Fault, RunStatus, new_run
from decoupled_diloco.observe.tape import Tape, TapeFollower
from decoupled_diloco.observe.tape_lines import TapeHeader
from decoupled_diloco.protocol.effects import Effect
from decoupled_diloco.protocol.events import (
  ConnectionLost,
  Event,
  MessageArrived,
  Restarted,
)


def init(header: TapeHeader) -> RunStatus:
  """A run of which nothing has happened yet.

  Raises:
    ValueError: if the header is not that of a syncer.
  """
  return new_run(header)


def resume(status: RunStatus, header: TapeHeader) -> RunStatus:
  """The syncer was started again: its connections and payloads are gone.

  Its first event says which of the merges that were under way are durable, if
  it goes on with the run; of the others nothing is left.

  Raises:
    ValueError: if the header is that of another run.
  """
  other = new_run(header)
  if (other.run_id, other.fragment_sizes, other.learners.keys()) != (
    status.run_id,
    status.fragment_sizes,
    status.learners.keys(),
  ):
    raise ValueError(
      f'the tape goes on with another run, {other.run_id}, or with other '
      f'fragments or learners than those of run {status.run_id}; give every '
      'run its own tape.'
    )
  status.budget_rounds = other.budget_rounds
  status.budget_tokens = other.budget_tokens
  status.min_learners = other.min_learners
  for learner in status.learners.values():
    if learner.is_connected:
      learner.lose('the syncer was started again', with_syncer=True)
  status.receipts_due.clear()
  status.phase = words.GATHERING
  status.is_resuming = True
  return status


def fold(tape: Tape) -> RunStatus:
  """The status at the end of a tape; of its last run, if it holds several."""
  status: RunStatus | None = None
  for number, segment in enumerate(tape.segments):
    status = _begin_segment(status, segment.header, number)
    for event, effects in segment.steps:
      update(status, event, effects)
  assert status is not None
  return status


def catch_up(
  status: RunStatus | None, follower: TapeFollower
) -> RunStatus | None:
  """Takes in all that a growing tape holds by now.

  Args:
    status: what the last call returned; None at first.
    follower: of the tape; used for nothing else.

  Returns:
    The status, a new one where another run begins; None while the tape has no
    header.
  """
  while True:
    steps = follower.poll()
    if follower.header is not None:
      if status is None or status.segment != follower.segment:
        status = _begin_segment(status, follower.header, follower.segment)
      for event, effects in steps:
        update(status, event, effects)
    if not steps:
      return status


def _begin_segment(
  status: RunStatus | None, header: TapeHeader, segment: int
) -> RunStatus:
  if status is not None and status.run_id == header.options.get('run_id'):
    status = resume(status, header)
  else:
    status = init(header)
  status.segment = segment
  return status


def update(
  status: RunStatus, event: Event, effects: Sequence[Effect]
) -> RunStatus:
  """Takes in one event of the syncer with its effects."""
  _set_clock(status, event.now)
  match event:
    case MessageArrived():
      bookkeeping.hear(status, event)
    case ConnectionLost(learner=learner, incarnation=incarnation):
      bookkeeping.lose(status, learner, incarnation, event.reason)
    case Restarted():
      bookkeeping.go_on(status, event)
  for effect in effects:
    bookkeeping.take_effect(status, event, effect)
  return status


def _set_clock(status: RunStatus, now: float) -> None:
  if status.began_at is None:
    status.began_at = status.now = now
    status.is_resuming = False
    return
  before = status.now
  if status.is_resuming and now + status.clock_offset < before:
    status.clock_offset = before - now
  status.now = max(now + status.clock_offset, before)
  if status.is_resuming:
    status.is_resuming = False
    away = status.now - before
    status.faults.append(Fault(status.now, None, away, 'started again', True))
    status.tell('syncer', f'The syncer is back after {away:.1f} s.')
