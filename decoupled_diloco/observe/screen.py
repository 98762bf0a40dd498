"""A run on a terminal: what is known of it, as a rich renderable."""

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import (
  Console,
  ConsoleOptions,
  Group,
  RenderableType,
  RenderResult,
)
from rich.table import Table
from rich.text import Text

from decoupled_diloco.observe import figures
from decoupled_diloco.observe.goodput import account
from decoupled_diloco.observe.learner_status import (
  ABSENT,
  COMPILING,
  DONE,
  DRAINING,
  JOINING,
  TRAINING,
  WAITING,
  LearnerStatus,
)
from decoupled_diloco.observe.lines import gathered, shown_round
from decoupled_diloco.observe.pace import Pace
from decoupled_diloco.observe.run_status import FINISHED, Happening, RunStatus

STATE_STYLES = {
  JOINING: 'cyan',
  COMPILING: 'cyan',
  TRAINING: 'green',
  WAITING: 'yellow',
  DRAINING: 'cyan',
  ABSENT: 'bold red',
  DONE: 'dim',
}
_HAPPENING_STYLES = {'lost': 'red', 'rejected': 'red', 'back': 'green'}
# Lines that are not rows of learners: figures, table head, gaps, a spare one.
_OTHER_LINES = 9
# Columns of the terminal from which on the table is spacious, and below which
# it does without some figures.
_WIDE = 94
_NARROW = 79


class Screen:
  """The live view; it fits itself to the size of the terminal.

  Attributes:
    status: what is shown.
    pace: rates of late.
    now: at least `status.now`, on the same clock: time goes on when nothing
      happens.
    max_happenings: how many of the last happenings are shown.
  """

  def __init__(
    self,
    status: RunStatus,
    pace: Pace,
    now: float,
    max_happenings: int,
  ):
    self.status = status
    self.pace = pace
    self.now = now
    self.max_happenings = max_happenings

  def __rich_console__(
    self, console: Console, options: ConsoleOptions
  ) -> RenderResult:
    """Renders it, for the width and height at hand."""
    height = options.height or console.height
    happenings = list(self.status.happenings)
    happenings = happenings[max(len(happenings) - self.max_happenings, 0) :]
    room = max(height - _OTHER_LINES - len(happenings), 3)
    yield Group(
      _heading(self.status, self.pace, self.now),
      '',
      *_learners(self.status, options.max_width, room),
      '',
      *(_happening_line(self.status, item) for item in happenings),
    )


def _heading(status: RunStatus, pace: Pace, now: float) -> Text:
  if status.opened_at is None:
    return Text.assemble((status.phase, 'bold'), f': {gathered(status)}')
  books = account(status)
  elapsed = status.elapsed_seconds
  if status.phase != FINISHED:
    elapsed = max(now - status.opened_at, elapsed)
  parts = [
    [
      Text(status.phase, style='bold'),
      _round_text(status),
      f'{figures.fixed(pace.rounds_per_second, 2)} rounds/s',
      f'quorum {figures.seconds(status.quorum_seconds.last)}',
      f'grace {figures.seconds(status.grace_seconds.last)}',
    ],
    [
      Text(f'goodput {figures.percent(books.goodput)}', style='bold'),
      Text(f'yield {figures.percent(books.yield_)}', style='bold'),
      _traffic('up', status.bytes_up, pace.up_bytes_per_second),
      _traffic('down', status.bytes_down, pace.down_bytes_per_second),
    ],
    [
      f'elapsed {figures.seconds(elapsed)}',
      f'left {figures.seconds(pace.left_seconds)}',
      _merged_text(status),
      f'faults survived {len(status.faults)}',
    ],
  ]
  return Text('\n').join(Text('  ').join(map(_text, line)) for line in parts)


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
    learners.sort(key=lambda learner: learner.state in (TRAINING, DONE))
    learners, hidden = learners[: room - 1], learners[room - 1 :]
    learners.sort(key=lambda learner: learner.learner)
  parts: list[RenderableType] = [_table(learners, width)]
  if hidden:
    states = Counter(figures.printable(learner.state) for learner in hidden)
    words = ', '.join(f'{n} {state}' for state, n in states.most_common())
    parts.append(
      Text(f'    and {words}', 'dim', no_wrap=True, overflow='ellipsis')
    )
  return parts


def _table(learners: Sequence[LearnerStatus], width: int) -> Table:
  is_wide = width >= _WIDE
  table = Table(
    box=box.SIMPLE_HEAD,
    show_edge=False,
    pad_edge=False,
    padding=(0, 1 if is_wide else 0, 0, 0),
  )
  columns = [
    ('learner', 7),
    ('state', 9),
    ('step', 6),
    ('loss', 6),
    ('tokens/s', 8),
    ('participation', 13),
    ('staleness' if is_wide else 'stale', 5),
    ('merged/refused', 14),
  ]
  if width < _NARROW:
    columns = [c for c in columns if c[0] not in ('tokens/s', 'stale')]
  for name, least in columns:
    table.add_column(
      name,
      justify='left' if name == 'state' else 'right',
      no_wrap=True,
      min_width=least,
    )
  for learner in learners:
    cells = _cells(learner)
    table.add_row(*(cells[name] for name, _ in columns))
  return table


def _cells(learner: LearnerStatus) -> dict[str, Text]:
  is_there = learner.is_connected
  staleness = Text(figures.fixed(learner.mean_staleness, 2))
  return {
    'learner': Text(str(learner.learner)),
    'state': Text(
      figures.printable(learner.state), STATE_STYLES.get(learner.state, '')
    ),
    'step': Text(f'{learner.total_steps:,}' if learner.incarnation else '-'),
    'loss': Text(figures.fixed(learner.loss, 3)),
    'tokens/s': Text(f'{learner.tokens_per_second:,.0f}' if is_there else '-'),
    'participation': Text(figures.percent(learner.participation)),
    'staleness': staleness,
    'stale': staleness,
    'merged/refused': Text(
      f'{learner.rounds_merged:,}/{sum(learner.refusals.values()):,}'
    ),
  }


def _happening_line(status: RunStatus, item: Happening) -> Text:
  since = item.at - (status.began_at or 0.0)
  return Text.assemble(
    (f'{figures.clock(since)} ', 'dim'),
    (figures.printable(item.text), _HAPPENING_STYLES.get(item.kind, '')),
    no_wrap=True,
    overflow='ellipsis',
  )
