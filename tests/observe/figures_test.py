"""Figures as people read them."""

import doctest

import pytest

from decoupled_diloco.observe import figures


def test_the_examples():
  result = doctest.testmod(figures)
  assert result.attempted and not result.failed


@pytest.mark.parametrize(
  ('value', 'text'),
  [
    (None, '-'),
    (float('inf'), '-'),
    (0.9996, '1.0 s'),
    (59.96, '1 min 00 s'),
    (3599.6, '1 h 00 min'),
    (48 * 3600, '2 d 00 h'),
  ],
)
def test_seconds_round_up_into_the_next_unit(value, text):
  assert figures.seconds(value) == text


@pytest.mark.parametrize(
  ('value', 'text'),
  [(999_999, '999,999'), (1_000_000, '1.00 M'), (999_999_999, '1.00 G')],
)
def test_counts_round_up_into_the_next_unit(value, text):
  assert figures.count(value) == text


def test_text_from_elsewhere_cannot_move_the_cursor():
  assert figures.printable('a\x1b[2Jb\r\nc') == 'a [2Jb  c'
