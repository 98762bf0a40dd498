"""Tables that fit."""

import io

from rich.console import Console
from rich.text import Text

from decoupled_diloco.observe.columns import (
  Column,
  most_important,
  split,
  table,
  width,
)

ONE = Column('one', ('1', '22'))  # 3 wide: its name.
LONG = Column('b', ('55555', Text('x')))  # 5 wide: its first cell.
WIDE = Column('c', ('', ''), least=8)
ALL = (ONE, LONG, WIDE)


def _names(columns):
  return [column.name for column in columns]


def test_widths():
  assert [column.width for column in ALL] == [3, 5, 8]
  assert width(ALL, 2) == 3 + 2 + 5 + 2 + 8
  assert Column('head', ()).width == 4


def test_the_least_important_give_way():
  order = ('c', 'one', 'b')
  assert _names(most_important(ALL, order, 18, 1)) == ['one', 'b', 'c']
  # 3 + 1 + 8 fit into 17, and 5 more do not.
  assert _names(most_important(ALL, order, 17, 1)) == ['one', 'c']
  assert _names(most_important(ALL, order, 11, 1)) == ['c']
  # The first is shown, come what may.
  assert _names(most_important(ALL, order, 1, 1)) == ['c']


def test_what_does_not_fit_goes_below():
  assert list(map(_names, split(ALL, 18, 1))) == [['one', 'b', 'c']]
  assert list(map(_names, split(ALL, 17, 1))) == [['one', 'b'], ['one', 'c']]
  assert list(map(_names, split(ALL, 1, 1))) == [['one', 'b'], ['one', 'c']]


def test_the_table_is_as_wide_as_promised():
  for gap in (1, 2, 3):
    console = Console(file=io.StringIO(), width=80, color_system=None)
    with console.capture() as capture:
      console.print(table(ALL, gap))
    lines = capture.get().splitlines()
    assert len(lines) == 4
    assert lines[1].strip() == '─' * width(ALL, gap)
    assert lines[2].split() == ['1', '55555']
