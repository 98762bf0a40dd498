"""A run in single lines of plain text, for a log file or a pipe."""

import statistics
import textwrap

from decoupled_diloco.observe import figures, words
from decoupled_diloco.observe.goodput import account
from decoupled_diloco.observe.rates import Rates
from decoupled_diloco.observe.run_status import Happening, RunStatus

_WIDTH = 100


def progress_line(status: RunStatus, rates: Rates, now: float) -> str:
  """Where the run stands.

  Args:
    status: of the run.
    rates: rates of late.
    now: at least `status.now`, on the same clock.
  """
  if status.opened_at is None:
    return f'{_stamp(status, now)}{status.phase}: {gathered(status)}'
  parts = [] if status.phase == words.RUNNING else [status.phase]
  books = account(status)
  losses = [
    learner.loss
    for learner in status.learners.values()
    if learner.is_connected and learner.loss is not None
  ]
  parts.append(f'round {shown_round(status)}')
  if status.budget_rounds:
    parts[-1] += f'/{status.budget_rounds}'
  parts.append(f'{figures.fixed(rates.rounds_per_second, 1)}/s')
  if status.budget_tokens:
    parts.append(
      f'merged {figures.count(status.merged_tokens)}/'
      f'{figures.count(status.budget_tokens)}'
    )
  parts += [
    f'loss {figures.fixed(statistics.fmean(losses) if losses else None, 3)}',
    f'goodput {figures.percent(books.goodput)}',
    f'yield {figures.percent(books.yield_)}',
    f'learners {len(status.connected)}/{len(status.learners)}',
  ]
  if rates.left_seconds is not None:
    parts.append(f'left {figures.clock(rates.left_seconds)}')
  return _stamp(status, now) + '  '.join(parts)


def happening_line(status: RunStatus, happening: Happening) -> str:
  """What happened; further lines are indented if it is long."""
  stamp = _stamp(status, happening.at)
  return textwrap.fill(
    figures.printable(happening.text),
    width=_WIDTH,
    initial_indent=stamp,
    subsequent_indent=' ' * len(stamp),
    break_on_hyphens=False,
  )


def shown_round(status: RunStatus) -> int:
  """The current round; those of the drain are not counted."""
  shown = max(status.current_round, 0)
  return min(shown, status.budget_rounds) if status.budget_rounds else shown


def gathered(status: RunStatus) -> str:
  """Who is there before round 0 is opened."""
  connected = len(status.connected)
  ready = sum(
    learner.is_connected
    and learner.state not in (words.JOINING, words.COMPILING)
    for learner in status.learners.values()
  )
  return (
    f'{connected} of {len(status.learners)} learners connected, {ready} ready'
  )


def _stamp(status: RunStatus, now: float) -> str:
  return f'[{figures.clock(now - (status.began_at or 0.0))}] '
