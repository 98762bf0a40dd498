"""What an experiment came to, as one table: its runs side by side."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from decoupled_diloco.chaos.result import ChaosResult
from decoupled_diloco.observe import figures

_SHOWN = 5


class _Row(NamedTuple):
  name: str
  value: Callable[[Any], str]


def _rejoin(result: ChaosResult) -> str:
  return (
    f'{figures.seconds(result.detect_seconds)} / '
    f'{figures.seconds(result.rejoin_seconds)}'
  )


def _faults(result: ChaosResult) -> str:
  total = sum(result.faults.values())
  kinds = ', '.join(
    f'{count} {kind}' for kind, count in sorted(result.faults.items())
  )
  return f'{total} ({kinds})' if kinds else '0'


def _growth(result: ChaosResult) -> str:
  return ', '.join(
    f'{whom if whom == "syncer" else f"learner {whom}"} {share:+.1%}'
    for whom, share in result.memory_growth.items()
  )


ROWS = (
  _Row('goodput', lambda r: figures.percent(r.goodput)),
  _Row('available', lambda r: figures.percent(r.available)),
  _Row(
    'goodput / available', lambda r: figures.percent(r.goodput_of_available)
  ),
  _Row('yield', lambda r: figures.percent(r.yield_)),
  _Row('participation', lambda r: figures.percent(r.participation)),
  _Row('uptime', lambda r: figures.percent(r.uptime)),
  _Row('held-out loss', lambda r: figures.fixed(r.held_out_loss, 4)),
  _Row('merged tokens', lambda r: figures.count(r.merged_tokens)),
  _Row('wall time', lambda r: figures.seconds(r.wall_seconds)),
  _Row('faults', _faults),
  _Row('kill: noticed / back', _rejoin),
  _Row('refusals', lambda r: str(sum(r.refusals.values()))),
  _Row('lives', lambda r: str(r.lives)),
  _Row('memory, second half', _growth),
)


def as_table(results: Mapping[str, ChaosResult]) -> Table:
  """The results as a rich table, one column each."""
  table = Table(box=None, pad_edge=False, header_style='bold')
  table.add_column('', style='dim')
  for phase in results:
    table.add_column(phase, overflow='fold')
  for row in ROWS:
    table.add_row(row.name, *(row.value(r) for r in results.values()))
  return table


def as_markdown(results: Mapping[str, ChaosResult]) -> str:
  """The results as a Markdown table."""
  lines = [
    '| | ' + ' | '.join(results) + ' |',
    '|---|' + '---|' * len(results),
  ]
  lines += [
    f'| {row.name} | '
    + ' | '.join(row.value(r) for r in results.values())
    + ' |'
    for row in ROWS
  ]
  return '\n'.join(lines) + '\n'


def faults_found(results: Mapping[str, ChaosResult]) -> Sequence[str]:
  """What is not as it must be, whatever the faults were; as sentences."""
  found = []
  for phase, result in results.items():
    if not result.is_complete:
      found.append(f'{phase}: the run is not complete ({result.end_reason}).')
    for name, texts in (
      ('crash', result.crashes),
      ('audit', result.problems),
    ):
      found += [f'{phase}, {name}: {text}' for text in texts[:_SHOWN]]
      if len(texts) > _SHOWN:
        found.append(f'{phase}, {name}: and {len(texts) - _SHOWN} more')
  return found
