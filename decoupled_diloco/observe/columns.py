"""Tables that fit the terminal: a narrow one gets fewer columns, or several.

Nothing is ever cut off in the middle of a figure.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text


class Column(NamedTuple):
  """One column.

  Attributes:
    name: its head.
    cells: one for each row.
    least: how wide it is at least, so that it keeps its place while figures
      grow.
    justify: 'left' or 'right'.
  """

  name: str
  cells: tuple[Text | str, ...]
  least: int = 0
  justify: str = 'right'

  @property
  def width(self) -> int:
    """Characters that it takes."""
    cells = [
      cell.cell_len if isinstance(cell, Text) else cell_len(cell)
      for cell in self.cells
    ]
    return max(self.least, cell_len(self.name), *cells, 0)


def width(columns: Sequence[Column], gap: int) -> int:
  """Characters that a table of these columns takes."""
  return sum(column.width + gap for column in columns) - gap


def most_important(
  columns: Sequence[Column], order: Sequence[str], room: int, gap: int
) -> list[Column]:
  """The columns that there is room for, in their own order.

  Args:
    columns: all of them.
    order: their names, the most important first.
    room: characters that there are.
    gap: characters between two columns.
  """
  chosen: list[Column] = []
  for column in sorted(columns, key=lambda column: order.index(column.name)):
    if chosen and width([*chosen, column], gap) > room:
      break
    chosen.append(column)
  return [column for column in columns if column in chosen]


def split(columns: Sequence[Column], room: int, gap: int) -> list[list[Column]]:
  """The columns of several tables, each of which begins with the first one."""
  first, *others = columns
  tables = [[first]]
  for column in others:
    if len(tables[-1]) > 1 and width([*tables[-1], column], gap) > room:
      tables.append([first])
    tables[-1].append(column)
  return tables


def table(columns: Sequence[Column], gap: int) -> Table:
  """The columns as a table with a line under its head."""
  made = Table(
    box=box.SIMPLE_HEAD,
    show_edge=False,
    pad_edge=False,
    # The line that SIMPLE_HEAD draws between columns is one blank.
    padding=(0, gap - 1, 0, 0),
  )
  for column in columns:
    made.add_column(
      column.name,
      justify='left' if column.justify == 'left' else 'right',
      no_wrap=True,
      min_width=column.width,
    )
  for row in zip(*(column.cells for column in columns), strict=True):
    made.add_row(*row)
  return made
