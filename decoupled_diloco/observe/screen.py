"""A run on a terminal: what is known of it, as a rich renderable."""

from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import (
  Console,
  ConsoleOptions,
  Group,
  RenderableType,
  RenderResult,
)
from rich.table import Table
from rich.text import Text

from decoupled_diloco.observe import columns, figures, words
from decoupled_diloco.observe.goodput import account
from decoupled_diloco.observe.learner_status import LearnerStatus
from decoupled_diloco.observe.lines import gathered, shown_round
from decoupled_diloco.observe.rates import Rates
from decoupled_diloco.observe.run_status import Happening, RunStatus

STATE_STYLES = {
  words.JOINING: 'cyan',
  words.COMPILING: 'cyan',
  words.TRAINING: 'green',
  words.WAITING: 'yellow',
  words.DRAINING: 'cyan',
  words.ABSENT: 'bold red',
  words.DONE: 'dim',
}
_HAPPENING_STYLES = {'lost': 'red', 'rejected': 'red', 'back': 'green'}
# Lines that are neither figures nor rows of learners: the head of the table,
# gaps, a spare one.
_OTHER_LINES = 6
# Columns of the terminal from which on the table is spacious.
_WIDE = 94
# What a narrow terminal does without comes last.
_IMPORTANCE = (
  *('learner', 'state', 'loss', 'steps', 'participation', 'merged'),
  *('refusals', 'tokens/s', 'staleness'),
)


class Screen:
  """The live view; it fits itself to the size of the terminal.

  Attributes:
    status: what is shown.
    rates: rates of late.
    now: at least `status.now`, on the same clock: time goes on when nothing
      happens.
    max_happenings: how many of the last happenings are shown.
  """

  def __init__(
    self,
    status: RunStatus,
    rates: Rates,
    now: float,
    max_happenings: int,
  ):
    self.status = status
    self.rates = rates
    self.now = now
    self.max_happenings = max_happenings

  def __rich_console__(
    self, console: Console, options: ConsoleOptions
  ) -> RenderResult:
    """Renders it, for the width and height at hand."""
    height = options.height or console.height
    happenings = list(self.status.happenings)
    happenings = happenings[max(len(happenings) - self.max_happenings, 0) :]
    heading = _heading(self.status, self.rates, self.now, options.max_width)
    above = len(heading) + _OTHER_LINES
    room = max(height - above - len(happenings), 3)
    yield Group(
      *heading,
      '',
      *_learners(self.status, options.max_width, room),
      '',
      *(_happening_line(self.status, item) for item in happenings),
    )


def _heading(
  status: RunStatus, rates: Rates, now: float, width: int
) -> list[Text]:
  """The figures of the run, in lines that are not wider than the terminal."""
  if status.opened_at is None:
    parts = [Text(f'{status.phase}:', 'bold'), Text(gathered(status))]
    return _flowed(parts, width, ' ')
  books = account(status)
  elapsed = status.elapsed_seconds
  if status.phase != words.FINISHED:
    elapsed = max(now - status.opened_at, elapsed)
  groups = [
    [
      Text(status.phase, style='bold'),
      _round_text(status),
      f'{figures.fixed(rates.rounds_per_second, 2)} rounds/s',
      f'quorum {figures.seconds(status.quorum_seconds.last)}',
      f'grace {figures.seconds(status.grace_seconds.last)}',
    ],
    [
      Text(f'goodput {figures.percent(books.goodput)}', style='bold'),
      Text(f'yield {figures.percent(books.yield_)}', style='bold'),
      _traffic('up', status.bytes_up, rates.up_bytes_per_second),
      _traffic('down', status.bytes_down, rates.down_bytes_per_second),
    ],
    [
      f'elapsed {figures.seconds(elapsed)}',
      f'left {figures.seconds(rates.left_seconds)}',
      _merged_text(status),
      f'faults survived {len(status.faults)}',
    ],
  ]
  lines = []
  for group in groups:
    lines += _flowed([_text(part) for part in group], width, '  ')
  return lines


def _flowed(parts: Sequence[Text], width: int, gap: str) -> list[Text]:
  """The parts in as few lines as they fit in, none of them broken."""
  lines: list[Text] = []
  for part in parts:
    if lines and lines[-1].cell_len + len(gap) + part.cell_len <= width:
      lines[-1] = Text.assemble(lines[-1], gap, part)
    else:
      lines.append(Text.assemble(part, no_wrap=True, overflow='ellipsis'))
  return lines


def _round_text(status: RunStatus) -> str:
  text = f'round {shown_round(status):,}'
  if status.budget_rounds:
    text += f' of {status.budget_rounds:,}'
  return text


def _merged_text(status: RunStatus) -> str:
  text = f'merged {figures.count(status.merged_tokens)}'
  if status.budget_tokens:
    text += f' of {figures.count(status.budget_tokens)}'
  return f'{text} tokens'


def _text(part: Text | str) -> Text:
  return part if isinstance(part, Text) else Text(part)


def _traffic(name: str, total: int, rate: float | None) -> str:
  return f'{name} {figures.num_bytes(total)} ({figures.num_bytes(rate)}/s)'


def _learners(status: RunStatus, width: int, room: int) -> list[RenderableType]:
  """One row per learner; of too many, those first that need attention."""
  learners = list(status.learners.values())
  hidden: list[LearnerStatus] = []
  if len(learners) > room:
    learners.sort(
      key=lambda learner: learner.state in (words.TRAINING, words.DONE)
    )
    learners, hidden = learners[: room - 1], learners[room - 1 :]
    learners.sort(key=lambda learner: learner.learner)
  parts: list[RenderableType] = [_table(learners, width)]
  if hidden:
    states = Counter(figures.printable(learner.state) for learner in hidden)
    counts = ', '.join(f'{n} {state}' for state, n in states.most_common())
    parts.append(
      Text(f'    and {counts}', 'dim', no_wrap=True, overflow='ellipsis')
    )
  return parts


def _table(learners: Sequence[LearnerStatus], width: int) -> Table:
  gap = 2 if width >= _WIDE else 1
  shown = columns.most_important(_columns(learners), _IMPORTANCE, width, gap)
  return columns.table(shown, gap)


def _columns(learners: Sequence[LearnerStatus]) -> list[columns.Column]:
  def column(
    name: str, least: int, cell: Callable[[LearnerStatus], Text | str]
  ) -> columns.Column:
    justify = 'left' if name == 'state' else 'right'
    return columns.Column(name, tuple(map(cell, learners)), least, justify)

  return [
    column('learner', 7, lambda learner: str(learner.learner)),
    column(
      'state',
      9,
      lambda learner: Text(
        figures.printable(learner.state), STATE_STYLES.get(learner.state, '')
      ),
    ),
    column(
      'steps',
      6,
      lambda learner: (
        f'{learner.total_steps:,}' if learner.incarnation else '-'
      ),
    ),
    column('loss', 6, lambda learner: figures.fixed(learner.loss, 3)),
    column(
      'tokens/s',
      8,
      lambda learner: (
        f'{learner.tokens_per_second:,.0f}' if learner.is_connected else '-'
      ),
    ),
    column(
      'participation',
      13,
      lambda learner: figures.percent(learner.participation),
    ),
    column(
      'staleness', 9, lambda learner: figures.fixed(learner.staleness_mean, 2)
    ),
    column('merged', 6, lambda learner: f'{learner.rounds_merged:,}'),
    column(
      'refusals', 8, lambda learner: f'{sum(learner.refusals.values()):,}'
    ),
  ]


def _happening_line(status: RunStatus, item: Happening) -> Text:
  since = item.at - (status.began_at or 0.0)
  return Text.assemble(
    (f'{figures.clock(since)} ', 'dim'),
    (figures.printable(item.text), _HAPPENING_STYLES.get(item.kind, '')),
    no_wrap=True,
    overflow='ellipsis',
  )
