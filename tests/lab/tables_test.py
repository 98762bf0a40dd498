"""From results to rows: choices, gaps, figures."""

import csv
import io
import math

import pytest

from decoupled_diloco.lab import plots, tables
from decoupled_diloco.lab.study import Cell, Variant


def make_cells(factors_and_choices, seeds=(0, 1)):
  return [
    Cell(Variant(factors, choice, {}), seed, {'of': [factors, choice, seed]})
    for seed in seeds
    for factors, choice in factors_and_choices
  ]


def give(cells, losses):
  """Results with these losses, in the order of the cells."""
  return {
    cell.key: {
      'loss': loss,
      'goodput': 0.5 + cell.seed / 4,
      'curve': [[100, loss + 1], [200, loss]],
    }
    for cell, loss in zip(cells, losses, strict=True)
    if loss is not None
  }


PARITY = make_cells(
  [
    ({'mode': 'data', 'M': 2}, {'lr': 1}),
    ({'mode': 'data', 'M': 2}, {'lr': 2}),
    ({'mode': 'ours', 'M': 2}, {'lr': 1}),
    ({'mode': 'ours', 'M': 4}, {'lr': 1}),
  ]
)
#        data lr 1, lr 2, ours 2, ours 4; then the same with seed 1
LOSSES = [2.0, 1.5, 2.2, 3.0, 2.0, 2.5, 2.0, 4.0]


def rows(results):
  return tables.rows_of(
    PARITY, results, reference={'mode': 'data'}, reference_by=('M',)
  )


def test_each_row_has_its_best_choice():
  """Means of data: (2 + 2) / 2 = 2 at lr 1, (1.5 + 2.5) / 2 = 2 at lr 2."""
  found = rows(give(PARITY, LOSSES))
  assert [row.factors for row in found] == [
    {'mode': 'data', 'M': 2},
    {'mode': 'ours', 'M': 2},
    {'mode': 'ours', 'M': 4},
  ]
  assert found[0].choice == {'lr': 1}  # The first of equals.
  assert found[0].num_choices == 2
  better = [*LOSSES]
  better[1] = 1.0  # (1 + 2.5) / 2 = 1.75
  found = rows(give(PARITY, better))
  assert found[0].choice == {'lr': 2}
  assert found[0].loss == 1.75
  # A run that diverged is never chosen.
  better[5] = math.inf
  assert rows(give(PARITY, better))[0].choice == {'lr': 1}
  better[1] = math.nan
  assert rows(give(PARITY, better))[0].choice == {'lr': 1}


def test_gaps_are_to_the_reference_of_the_same_kind():
  """(2.2 + 2) / 2 = 2.1 against 2: 5 %. For M=4 there is no reference."""
  data, two, four = rows(give(PARITY, LOSSES))
  assert data.gap == 0
  assert two.gap == pytest.approx(0.05)
  assert math.isnan(four.gap)
  # Standard deviation of 2.2 and 2.0: 0.2 / sqrt(2); of 2.2 / 2 and 2 / 2.
  assert two.spread == pytest.approx(0.2 / 2**0.5)
  assert two.gap_spread == pytest.approx(0.1 / 2**0.5)
  assert data.gap_spread == 0 and math.isnan(four.gap_spread)


def test_a_row_that_diverged():
  losses = [*LOSSES]
  losses[2] = math.inf
  _, two, _ = found = rows(give(PARITY, losses))
  assert two.loss == two.gap == math.inf
  assert math.isnan(two.spread) and math.isnan(two.gap_spread)
  assert '| inf | nan | +inf |  |' in tables.to_markdown(found)


def test_rows_wait_for_all_their_runs():
  """Else a choice that is still running would be passed over."""
  missing: list[float | None] = [*LOSSES]
  missing[5] = None
  assert [row.factors['mode'] for row in rows(give(PARITY, missing))] == [
    'ours',
    'ours',
  ]
  assert rows({}) == []


def test_figures_and_curves_are_means():
  _, two, _ = rows(give(PARITY, LOSSES))
  assert two.figures == {'goodput': (0.5 + 0.75) / 2}
  assert two.curve == [(100, pytest.approx(3.1)), (200, pytest.approx(2.1))]


def test_markdown():
  lines = tables.to_markdown(rows(give(PARITY, LOSSES))).splitlines()
  assert lines == [
    '| mode | M | lr | loss | spread | gap % | ± | goodput |',
    '| --- | --- | --- | --- | --- | --- | --- | --- |',
    '| data | 2 | 1 | 2.0000 | 0.0000 | +0.00 | 0.00 | 0.625 |',
    '| ours | 2 | 1 | 2.1000 | 0.1414 | +5.00 | 7.07 | 0.625 |',
    '| ours | 4 | 1 | 3.5000 | 0.7071 |  |  | 0.625 |',
  ]


def test_csv_has_every_seed():
  text = tables.to_csv(rows(give(PARITY, LOSSES)))
  found = list(csv.DictReader(io.StringIO(text)))
  assert found[1]['loss of seed 0'] == '2.2'
  assert found[1]['loss of seed 1'] == '2.0'
  assert found[1]['gap %'] == '+5.00'


@pytest.mark.parametrize(
  'plot',
  [
    {'x': 'M', 'y': 'loss', 'lines': 'mode', 'panels': '', 'log_x': True},
    {'x': 'mode', 'y': 'goodput', 'lines': '', 'panels': '', 'log_x': False},
    {'x': 'tokens', 'y': 'loss', 'lines': '', 'panels': '', 'log_x': False},
  ],
)
def test_plots_are_pictures(tmp_path, plot):
  path = tmp_path / 'plot.png'
  plots.save(rows(give(PARITY, LOSSES)), path, title='a study', plot=plot)
  assert path.read_bytes().startswith(b'\x89PNG')
  assert path.stat().st_size > 10_000


def test_a_row_without_the_factor_of_the_plot_is_a_line(tmp_path):
  cells = make_cells([({'mode': 'data'}, {}), ({'mode': 'ours', 'M': 4}, {})])
  found = tables.rows_of(cells, give(cells, [2.0] * 4), reference={})
  plot = {'x': 'M', 'y': 'loss', 'lines': 'mode', 'panels': '', 'log_x': True}
  plots.save(found, tmp_path / 'x.png', title='', plot=plot)
  plot['panels'] = 'mode'
  plots.save(found, tmp_path / 'x.png', title='', plot=plot)
  # A study draws what is complete, which may be such a row alone.
  plots.save(found[:1], tmp_path / 'x.png', title='', plot=plot)


@pytest.mark.parametrize(
  ('change', 'says'),
  [
    ({'x': 'H'}, r"plot.x='H' must be a factor of the study: mode, M"),
    ({'lines': 'H'}, "plot.lines='H'"),
    ({'panels': 'H'}, "plot.panels='H'"),
    ({'lines': 'tokens'}, "plot.lines='tokens'"),
    ({'y': 'speed'}, r"plot.y='speed' must be one of loss, goodput"),
  ],
)
def test_a_plot_of_what_is_not_there(change, says):
  plot = {'x': 'M', 'y': 'loss', 'lines': '', 'panels': '', 'log_x': False}
  plots.check({**plot, 'x': 'tokens', 'y': 'yield'}, ['mode', 'M'])
  with pytest.raises(ValueError, match=says):
    plots.check({**plot, **change}, ['mode', 'M'])
