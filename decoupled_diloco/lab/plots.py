"""A study's rows as a picture."""

import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from decoupled_diloco.lab.study import in_words
from decoupled_diloco.lab.tables import FIGURES, Row

# Distinguishable also without colour.
_MARKERS = 'osD^vPX*<>'


def check(plot: Mapping[str, Any], factors: Collection[str]) -> None:
  """Finds out before any run whether a plot can be drawn.

  Args:
    plot: see `save`.
    factors: of all rows of the study.

  Raises:
    ValueError: if x, lines or panels is no factor, or y no figure.
  """
  for field in ('x', 'lines', 'panels'):
    name = plot[field]
    is_curve = field == 'x' and name == 'tokens'
    if name and not is_curve and name not in factors:
      raise ValueError(
        f'config.plot.{field}={name!r} must be a factor of the study: '
        f'{", ".join(factors)}.'
      )
  if plot['y'] not in ('loss', *FIGURES):
    raise ValueError(
      f'config.plot.y={plot["y"]!r} must be one of loss, {", ".join(FIGURES)}.'
    )


def save(
  rows: Sequence[Row],
  path: pathlib.Path,
  *,
  title: str,
  plot: Mapping[str, Any],
) -> None:
  """Writes a PNG: a figure of the rows over a factor, or their loss curves.

  Args:
    rows: of the table.
    path: of the file.
    title: above the picture.
    plot: `x`, a factor, or 'tokens' for curves over merged tokens (rows without
      that factor are lines from end to end); `y`, 'loss' or a figure; `lines`,
      the factor that has a line per value ('' for one line in all); `panels`,
      the factor that has a picture of its own per value ('' for one in all);
      `log_x`.

  Raises:
    ImportError: without matplotlib; it comes with the extra `lab`.
  """
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  by_panel: dict[Any, list[Row]] = {}
  for row in rows:
    by_panel.setdefault(row.factors.get(plot['panels']), []).append(row)
  figure = Figure(figsize=(3 + 4 * len(by_panel), 4.5), layout='constrained')
  FigureCanvasAgg(figure)
  [panels] = figure.subplots(1, len(by_panel), sharey=True, squeeze=False)
  for axes, (value, members) in zip(panels, by_panel.items(), strict=True):
    if plot['x'] == 'tokens':
      _draw_curves(axes, members)
    else:
      _draw_factors(axes, members, plot)
    if plot['panels']:
      axes.set_title(f'{plot["panels"]}={value}')
    axes.grid(alpha=0.3)
    axes.label_outer()
  if panels[0].get_legend_handles_labels()[0]:
    panels[0].legend(fontsize='small')
  figure.suptitle(title)
  figure.savefig(path, dpi=150)


def _draw_curves(axes: Any, rows: Sequence[Row]) -> None:
  for index, row in enumerate(rows):
    if row.curve:
      tokens, losses = zip(*row.curve, strict=True)
      marker = _MARKERS[index % len(_MARKERS)]
      axes.plot(
        tokens,
        losses,
        marker=marker,
        markevery=0.2,
        ms=4,
        lw=1.2,
        label=row.name,
      )
  axes.set_xlabel('merged tokens')
  axes.set_ylabel('held-out loss (nats per token)')


def _draw_factors(
  axes: Any, rows: Sequence[Row], plot: Mapping[str, Any]
) -> None:
  x, y, lines = plot['x'], plot['y'], plot['lines']
  by_line: dict[Any, list[Row]] = {}
  for row in rows:
    if x in row.factors:
      by_line.setdefault(row.factors.get(lines), []).append(row)
    else:
      # A panel's legend is that of all.
      factors = {
        name: value
        for name, value in row.factors.items()
        if name != plot['panels']
      }
      axes.axhline(
        row.loss, ls='--', lw=1.2, color='gray', label=in_words(factors)
      )
  placed = [row for row in rows if x in row.factors]
  positions = list(dict.fromkeys(row.factors[x] for row in placed))
  is_numeric = all(isinstance(value, int | float) for value in positions)
  for index, (value, members) in enumerate(by_line.items()):
    at = [
      row.factors[x] if is_numeric else positions.index(row.factors[x])
      for row in members
    ]
    heights = [
      row.loss if y == 'loss' else row.figures.get(y, float('nan'))
      for row in members
    ]
    axes.errorbar(
      at,
      heights,
      yerr=[row.spread for row in members] if y == 'loss' else None,
      marker=_MARKERS[index % len(_MARKERS)],
      capsize=3,
      lw=1.2,
      label=f'{lines}={value}' if lines else None,
    )
  if is_numeric and plot['log_x']:
    axes.set_xscale('log', base=2)
  if is_numeric:
    axes.set_xticks(positions, [f'{value:g}' for value in positions])
    axes.minorticks_off()
  else:
    axes.set_xticks(range(len(positions)), [str(value) for value in positions])
  axes.set_xlabel(x)
  axes.set_ylabel(
    'held-out loss (nats per token)' if y == 'loss' else y.replace('_', ' ')
  )
