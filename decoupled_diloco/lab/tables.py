"""From the results of a study to its table."""

import csv
import dataclasses
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from decoupled_diloco.lab.study import Cell, in_words

# Columns beside the loss, as the means over the seeds, and how they are shown.
FIGURES = {
  'goodput': '{:.3f}',
  'yield': '{:.3f}',
  'participation': '{:.2f}',
  'staleness': '{:.2f}',
  'bits_up': '{:.2f}',
  'bits_down': '{:.2f}',
  'processed_tokens': '{:,.0f}',
  'merged_tokens': '{:,.0f}',
  'virtual_seconds': '{:.0f}',
}


@dataclasses.dataclass(frozen=True)
class Row:
  """One row: the best choice for its factors.

  Attributes:
    factors: what sets it apart.
    choice: what was chosen, of how many.
    losses: held-out loss by seed, nats per token.
    gap: relative distance of the mean loss to the reference's; nan without.
    gap_spread: standard deviation of that distance over the seeds, each seed
      compared with the same one of the reference; nan without.
    figures: means over the seeds.
    curve: (merged tokens, held-out loss), mean over the seeds.
  """

  factors: Mapping[str, Any]
  choice: Mapping[str, Any]
  num_choices: int
  losses: Mapping[int, float]
  gap: float
  gap_spread: float
  figures: Mapping[str, float]
  curve: Sequence[tuple[float, float]]

  @property
  def name(self) -> str:
    """Its factors in words."""
    return in_words(self.factors)

  @property
  def loss(self) -> float:
    """Mean over the seeds."""
    return statistics.fmean(self.losses.values())

  @property
  def spread(self) -> float:
    """Standard deviation over the seeds; nan for one, or if one diverged."""
    return _spread(list(self.losses.values()))


def rows_of(
  cells: Iterable[Cell],
  results: Mapping[str, Mapping[str, Any]],
  *,
  reference: Mapping[str, Any],
  reference_by: Sequence[str] = (),
) -> list[Row]:
  """The rows whose runs are all there, in the order of the study.

  A choice counts only with all of its seeds, so that none wins by a lucky one.

  Args:
    cells: of the study.
    results: by the cells' keys; runs may be missing.
    reference: factors of the row that losses are compared with.
    reference_by: see `study.default_study`.
  """
  by_row: dict[str, dict[str, list[Cell]]] = {}
  for cell in cells:
    choices = by_row.setdefault(cell.variant.row, {})
    choices.setdefault(cell.variant.name, []).append(cell)
  rows = []
  for choices in by_row.values():
    whole = [
      _row(group, results, len(choices))
      for group in choices.values()
      if all(cell.key in results for cell in group)
    ]
    if len(whole) == len(choices):
      rows.append(min(whole, key=lambda row: _ordered(row.loss)))
  return [_compared(row, rows, reference, reference_by) for row in rows]


def _spread(values: Sequence[float]) -> float:
  if len(values) < 2 or not all(map(math.isfinite, values)):
    return math.nan  # The library's function raises.
  return statistics.stdev(values)


def _ordered(loss: float) -> float:
  return math.inf if math.isnan(loss) else loss


def _row(
  cells: Sequence[Cell], results: Mapping[str, Mapping[str, Any]], choices: int
) -> Row:
  found = [results[cell.key] for cell in cells]
  curves = [result.get('curve', []) for result in found]
  length = min(map(len, curves))
  return Row(
    factors=cells[0].variant.factors,
    choice=cells[0].variant.choice,
    num_choices=choices,
    losses={
      cell.seed: result['loss']
      for cell, result in zip(cells, found, strict=True)
    },
    gap=math.nan,
    gap_spread=math.nan,
    figures={
      name: statistics.fmean(result[name] for result in found)
      for name in FIGURES
      if all(result.get(name) is not None for result in found)
    },
    curve=[
      (
        statistics.fmean(curve[i][0] for curve in curves),
        statistics.fmean(curve[i][1] for curve in curves),
      )
      for i in range(length)
    ],
  )


def _compared(
  row: Row,
  rows: Sequence[Row],
  reference: Mapping[str, Any],
  reference_by: Sequence[str],
) -> Row:
  """The row with its gap, if it has a reference."""
  if not reference:
    return row
  wanted = {**{name: row.factors.get(name) for name in reference_by}}
  wanted.update(reference)
  for other in rows:
    if all(other.factors.get(name) == wanted[name] for name in wanted):
      gaps = [loss / other.losses[seed] for seed, loss in row.losses.items()]
      return dataclasses.replace(
        row,
        gap=row.loss / other.loss - 1,
        gap_spread=_spread(gaps),
      )
  return row


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
  factors = list(dict.fromkeys(name for row in rows for name in row.factors))
  choices = list(dict.fromkeys(name for row in rows for name in row.choice))
  figures = [
    name for name in FIGURES if any(name in row.figures for row in rows)
  ]
  has_gaps = any(not math.isnan(row.gap) for row in rows)
  head = [
    *factors,
    *choices,
    'loss',
    'spread',
    *(['gap %', '±'] if has_gaps else []),
    *(name.replace('_', ' ') for name in figures),
  ]
  body = []
  for row in rows:
    line = [str(row.factors.get(name, '')) for name in factors]
    line += [str(row.choice.get(name, '')) for name in choices]
    line += [f'{row.loss:.4f}', f'{row.spread:.4f}']
    if has_gaps:
      line.append(_percent(row.gap, '+'))
      line.append(_percent(row.gap_spread, ''))
    line += [
      FIGURES[name].format(row.figures[name]) if name in row.figures else ''
      for name in figures
    ]
    body.append(line)
  return head, body


def _percent(share: float, sign: str) -> str:
  return '' if math.isnan(share) else f'{share:{sign}.2%}'[:-1]


def to_markdown(rows: Sequence[Row]) -> str:
  """The table as Markdown."""
  head, body = _cells(rows)
  lines = [head, ['---'] * len(head), *body]
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def to_csv(rows: Sequence[Row]) -> str:
  """The table as CSV, with a column for every seed's loss."""
  head, body = _cells(rows)
  seeds = sorted({seed for row in rows for seed in row.losses})
  file = io.StringIO()
  writer = csv.writer(file, lineterminator='\n')
  writer.writerow([*head, *(f'loss of seed {seed}' for seed in seeds)])
  for row, line in zip(rows, body, strict=True):
    losses = [row.losses.get(seed, '') for seed in seeds]
    writer.writerow([*line, *losses])
  return file.getvalue()
