"""A run's summary for people: on the terminal, or as plain text."""

import io

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from decoupled_diloco.observe import figures
from decoupled_diloco.observe.summary import FaultSummary, Summary

_FAULTS_SHOWN = 5


def render(summary: Summary) -> RenderableType:
  """The summary as a rich renderable, at its best from 80 columns on."""
  parts: list[RenderableType] = [_title(summary), '', _figures(summary)]
  parts += ['', _learners(summary)]
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
  grid.add_row(
    'held-out loss',
    Text.assemble(
      (figures.fixed(facts.held_out_loss_start, 4), 'bold'),
      ' -> ',
      (figures.fixed(facts.held_out_loss_end, 4), 'bold'),
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
    'time',
    f'{figures.seconds(summary.wall_seconds)} of training; start-up '
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
  missing = [
    f'learner {learner.learner} '
    f'({figures.printable(learner.missing_because) or "never came"})'
    for learner in summary.learners
    if learner.is_missing
  ]
  if missing:
    grid.add_row('missing', '\n'.join(missing))
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
  words = [f'{count} {name}' for name, count in summary.refusals.items()]
  if summary.rejections:
    words.append(f'{summary.rejections} learners not admitted')
  return ', '.join(words) or '0'


def _learners(summary: Summary) -> Table:
  table = Table(
    box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
  )
  table.add_column('learner', justify='right', no_wrap=True)
  for name in (
    'steps',
    'tokens/s',
    'participation',
    'after return',
    'stale',
    'weight',
    'refused',
  ):
    table.add_column(name, justify='right', no_wrap=True)
  for learner in summary.learners:
    rate = learner.tokens_per_second
    table.add_row(
      str(learner.learner),
      f'{learner.steps:,}',
      '-' if rate is None else f'{rate:,.0f}',
      figures.percent(learner.participation),
      figures.percent(learner.participation_since_latest),
      figures.fixed(learner.mean_staleness, 2),
      figures.percent(learner.weight_share),
      str(sum(learner.refusals.values())),
    )
  return table


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
