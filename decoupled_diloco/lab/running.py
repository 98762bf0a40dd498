"""Carries a study out: what is missing is run, and everything is written."""

import gc
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
from rich import console, progress

from decoupled_diloco import entry
from decoupled_diloco.lab import figures, plots, run_config, tables, workers
from decoupled_diloco.lab.results import Results
from decoupled_diloco.lab.study import Cell, cells_of


class Study:
  """A study and its folder.

  Args:
    config: from `study.default_study`.

  Raises:
    ValueError: if a run of the study has a config that is not right, or the
      plot cannot be drawn.
    OSError: if the folder cannot be written.
  """

  def __init__(self, config: Any):
    self._config = config
    self._cells = cells_of(config)
    for cell in self._cells:
      try:
        run_config.options_of(cell.run)
      except ValueError as error:
        raise ValueError(f'Variant {cell.variant.name!r}: {error}') from error
    factors = [name for cell in self._cells for name in cell.variant.factors]
    plots.check(config.plot.to_dict(), dict.fromkeys(factors))
    self.workdir = pathlib.Path(config.workdir)
    self.workdir.mkdir(parents=True, exist_ok=True)
    self._results = Results(self.workdir / 'results.jsonl')

  @property
  def num_cells(self) -> int:
    """How many runs there are."""
    return len(self._cells)

  def run(self) -> None:
    """Runs what is missing, and keeps each result as it comes."""
    missing = [cell for cell in self._cells if cell.key not in self._results]
    if len(missing) < self.num_cells:
      print(
        f'{self.num_cells - len(missing)} of {self.num_cells} runs are there '
        f'already, in {self.workdir}.',
        flush=True,
      )
    runs = [dict(cell.run) for cell in missing]
    with _Progress(self._config.name, self.num_cells, len(missing)) as shown:
      for index, result in workers.run_all(
        run_one, runs, self._config.processes
      ):
        cell = missing[index]
        self._results.add(
          cell.key,
          {'variant': cell.variant.name, 'seed': cell.seed, **result},
        )
        shown.advance(cell, result)
        self.write()
    self.write()

  def rows(self) -> list[tables.Row]:
    """The rows that are complete."""
    found = {}
    for cell in self._cells:
      result = self._results.get(cell.key)
      if result is not None:
        found[cell.key] = result
    return tables.rows_of(
      self._cells,
      found,
      reference=self._config.reference.to_dict(),
      reference_by=self._config.reference_by,
    )

  def table(self) -> str:
    """The table as Markdown."""
    return tables.to_markdown(self.rows())

  def write(self) -> None:
    """Writes table and plot of what is complete."""
    rows = self.rows()
    if not rows:
      return
    _replace(self.workdir / 'table.md', tables.to_markdown(rows))
    _replace(self.workdir / 'table.csv', tables.to_csv(rows))
    if self._config.plot.x:
      plots.save(
        rows,
        self.workdir / 'plot.png',
        title=self._config.name,
        plot=self._config.plot.to_dict(),
      )


def run_one(run: Mapping[str, Any]) -> dict[str, Any]:
  """One run, in a process that does nothing else; its result as plain values.

  A run whose loss is not finite has this result: that is a finding, too.
  """
  entry.prepare_jax()
  began = time.monotonic()
  try:
    result = figures.figures_of(run)
  except FloatingPointError as error:
    result = {'loss': float('inf'), 'error': str(error)}
  # The next run may be of other shapes; what was compiled is on disk as well.
  jax.clear_caches()
  gc.collect()
  return {**result, 'seconds': round(time.monotonic() - began, 1)}


def _replace(path: pathlib.Path, text: str) -> None:
  """Writes a file at once, so that a reader never sees half of it."""
  new = path.with_suffix(path.suffix + '.new')
  new.write_text(text, encoding='utf-8')
  new.replace(path)


class _Progress:
  """A bar on a terminal, otherwise a line per run."""

  def __init__(self, name: str, total: int, missing: int):
    self._done = total - missing
    self._total = total
    self._seconds: list[float] = []
    self._console = console.Console(file=sys.stdout, soft_wrap=True)
    self._bar = progress.Progress(
      progress.TextColumn(name),
      progress.BarColumn(),
      progress.MofNCompleteColumn(),
      progress.TimeElapsedColumn(),
      progress.TextColumn('left'),
      progress.TimeRemainingColumn(elapsed_when_finished=False),
      console=self._console,
      disable=not self._console.is_terminal,
    )
    self._task = self._bar.add_task(name, total=total, completed=self._done)

  def __enter__(self) -> '_Progress':
    self._bar.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._bar.stop()

  def advance(self, cell: Cell, result: Mapping[str, Any]) -> None:
    self._done += 1
    self._seconds.append(result['seconds'])
    self._console.print(
      f'[{self._done}/{self._total}] {cell.variant.name}, seed {cell.seed}: '
      f'loss {result["loss"]:.4f} ({result["seconds"]:.0f} s; median '
      f'{statistics.median(self._seconds):.0f} s)',
      markup=False,
      highlight=False,
    )
    self._bar.advance(self._task)
