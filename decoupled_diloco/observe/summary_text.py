"""A run's summary for people: on the terminal, or as plain text."""

import io
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

from decoupled_diloco.observe import columns, figures
from decoupled_diloco.observe.summary import (
  FaultSummary,
  LearnerSummary,
  Summary,
)

_FAULTS_SHOWN = 5


def render(summary: Summary) -> RenderableType:
  """The summary as a rich renderable, at its best from 80 columns on."""
  parts: list[RenderableType] = [_title(summary), '', _figures(summary)]
  parts += ['', _Learners(summary.learners)]
  places = _places(summary)
  if places:
    parts += ['', *places]
  if summary.facts.sample:
    sample = '\n'.join(
      figures.printable(line) for line in summary.facts.sample.splitlines()
    )
    parts += ['', Text('sample of the global model', 'bold'), Text(sample)]
  return Group(*parts)


def to_text(summary: Summary, width: int = 80) -> str:
  """The summary as plain text, without a control character but line feeds."""
  console = Console(
    file=io.StringIO(), width=width, color_system=None, legacy_windows=False
  )
  with console.capture() as capture:
    console.print(render(summary))
  lines = (line.rstrip() for line in capture.get().splitlines())
  return '\n'.join(lines) + '\n'


def _title(summary: Summary) -> Text:
  how, style = ('complete', 'bold green')
  if not summary.is_complete:
    how, style = ('not complete', 'bold red')
  reason = figures.printable(summary.end_reason)
  return Text.assemble(
    (f'Run {figures.printable(summary.run_id)}: ', 'bold'),
    (how, style),
    f' ({reason})' if reason else '',
  )


def _figures(summary: Summary) -> Table:
  grid = Table.grid(padding=(0, 2, 0, 0))
  grid.add_column(style='dim', no_wrap=True)
  grid.add_column(overflow='fold')
  facts = summary.facts
  losses = (facts.held_out_loss_start, facts.held_out_loss_end)
  if losses != (None, None):
    before, after = (figures.fixed(loss, 4) for loss in losses)
    grid.add_row(
      'held-out loss',
      Text.assemble(
        *((before, 'bold'), ' -> ', (after, 'bold')),
        ' nats per token, global model',
      ),
    )
  grid.add_row(
    'goodput',
    Text.assemble(
      (figures.percent(summary.goodput), 'bold'),
      f'  {figures.count(summary.useful_tokens)} useful of '
      f'{figures.count(summary.capacity_tokens)} tokens of capacity',
    ),
  )
  grid.add_row(
    'yield',
    Text.assemble(
      (figures.percent(summary.yield_), 'bold'),
      f'  {figures.count(summary.merged_tokens)} merged of '
      f'{figures.count(summary.processed_tokens)} processed tokens',
    ),
  )
  grid.add_row(
    'rounds',
    f'{summary.rounds_merged:,} merged; quorum '
    f'{figures.seconds(summary.quorum_seconds_median)}, grace '
    f'{figures.seconds(summary.grace_seconds_median)} (medians)',
  )
  grid.add_row(
    'wall time',
    f'{figures.seconds(summary.wall_seconds)}; start-up '
    f'{figures.seconds(summary.startup_seconds)}, drain '
    f'{figures.seconds(summary.drain_seconds)}',
  )
  grid.add_row(
    'bits/parameter',
    f'{figures.fixed(summary.bits_up, 2)} up, '
    f'{figures.fixed(summary.bits_down, 2)} down, per synchronisation',
  )
  grid.add_row(
    'traffic',
    f'{figures.num_bytes(summary.bytes_up)} up, '
    f'{figures.num_bytes(summary.bytes_down)} down, all learners together',
  )
  grid.add_row('faults survived', _faults(summary.faults))
  absent = [
    f'learner {learner.learner} '
    f'({figures.printable(learner.absent_because) or "never came"})'
    for learner in summary.learners
    if learner.is_absent
  ]
  if absent:
    grid.add_row('absent', '\n'.join(absent))
  grid.add_row('refusals', _refusals(summary))
  return grid


def _faults(faults: tuple[FaultSummary, ...]) -> str:
  lines = []
  for fault in faults[:_FAULTS_SHOWN]:
    who = 'syncer' if fault.learner is None else f'learner {fault.learner}'
    how = 'new process' if fault.is_new_process else 'same process'
    lines.append(
      f'{who} away {figures.seconds(fault.seconds_away)} '
      f'({figures.printable(fault.reason)}; {how})'
    )
  if len(faults) > _FAULTS_SHOWN:
    lines.append(f'and {len(faults) - _FAULTS_SHOWN} more')
  return '\n'.join([str(len(faults)), *lines])


def _refusals(summary: Summary) -> str:
  parts = [f'{count} {name}' for name, count in summary.refusals.items()]
  if summary.rejections:
    parts.append(f'{summary.rejections} rejections (not admitted)')
  return ', '.join(parts) or '0'


class _Learners:
  """What every learner has done; in several tables where one is too wide."""

  def __init__(self, learners: Sequence[LearnerSummary]):
    self._columns = _columns(learners)

  def __rich_console__(
    self, console: Console, options: ConsoleOptions
  ) -> RenderResult:
    """Renders them, for the width at hand."""
    del console
    room = options.max_width
    gap = 2 if columns.width(self._columns, 2) <= room else 1
    for number, shown in enumerate(columns.split(self._columns, room, gap)):
      if number:
        yield ''
      yield columns.table(shown, gap)


def _columns(learners: Sequence[LearnerSummary]) -> list[columns.Column]:
  def column(
    name: str, cell: Callable[[LearnerSummary], str]
  ) -> columns.Column:
    return columns.Column(name, tuple(map(cell, learners)))

  return [
    column('learner', lambda learner: str(learner.learner)),
    column('steps', lambda learner: f'{learner.steps:,}'),
    column('tokens/s', lambda learner: _rate(learner.tokens_per_second)),
    column(
      'participation', lambda learner: figures.percent(learner.participation)
    ),
    column(
      'since return',
      lambda learner: figures.percent(learner.participation_since_return),
    ),
    column(
      'staleness', lambda learner: figures.fixed(learner.staleness_mean, 2)
    ),
    column('weight', lambda learner: figures.percent(learner.weight_share)),
    column('refusals', lambda learner: str(sum(learner.refusals.values()))),
  ]


def _rate(value: float | None) -> str:
  return '-' if value is None else f'{value:,.0f}'


def _places(summary: Summary) -> list[Text]:
  """Where things lie; folded, not cut, so that a path can be copied."""
  facts = summary.facts
  places = (
    ('checkpoint', facts.checkpoint),
    ('tape', facts.tape),
    ('metrics', facts.metrics),
  )
  return [
    Text.assemble((f'{name:<12}', 'dim'), path, overflow='fold')
    for name, path in places
    if path
  ]
