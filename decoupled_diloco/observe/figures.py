"""Figures as people read them; '-' where there is none."""

import math

from rich.filesize import decimal


def percent(share: float | None) -> str:
  """A share of 1.

  >>> percent(0.9612)
  '96.1 %'
  """
  return '-' if share is None else f'{100 * share:.1f} %'


def fixed(value: float | None, digits: int) -> str:
  """A number with so many digits after the point.

  >>> fixed(3.14159, 2)
  '3.14'
  """
  return '-' if value is None else f'{value:.{digits}f}'


def num_bytes(value: float | None) -> str:
  """Bytes in powers of a thousand.

  >>> num_bytes(125), num_bytes(12_100_000)
  ('125 B', '12.1 MB')
  """
  if value is None:
    return '-'
  number, unit = decimal(round(value)).split()
  return f'{number} {unit if unit.endswith("B") else "B"}'


def count(value: float | None) -> str:
  """A number of tokens, in full up to a million.

  >>> count(123456.7), count(12_345_678)
  ('123,457', '12.35 M')
  """
  if value is None:
    return '-'
  if abs(value) < 1e6:
    return f'{round(value):,}'
  value /= 1e6
  for unit in ('M', 'G', 'T'):
    if abs(value) < 999.995 or unit == 'T':
      break
    value /= 1000
  return f'{value:.2f} {unit}'


def seconds(value: float | None) -> str:
  """A duration.

  >>> seconds(0.0123), seconds(7.12), seconds(62), seconds(3720)
  ('12 ms', '7.1 s', '1 min 02 s', '1 h 02 min')
  """
  if value is None or not math.isfinite(value):
    return '-'
  if abs(value) < 0.9995:
    return f'{1000 * value:.0f} ms'
  if abs(value) < 59.95:
    return f'{value:.1f} s'
  minutes, rest = divmod(round(value), 60)
  if minutes < 60:
    return f'{minutes} min {rest:02d} s'
  hours, minutes = divmod(minutes, 60)
  if hours < 48:
    return f'{hours} h {minutes:02d} min'
  return f'{hours // 24} d {hours % 24:02d} h'


def clock(value: float) -> str:
  """A time since the beginning.

  >>> clock(3725.6)
  '1:02:05'
  """
  minutes, rest = divmod(int(value), 60)
  return f'{minutes // 60}:{minutes % 60:02d}:{rest:02d}'


def printable(text: str) -> str:
  """Text from elsewhere on one line, without control characters."""
  return ''.join(
    character if character.isprintable() else ' ' for character in text
  ).strip()
