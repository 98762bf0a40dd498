"""The examples in the docstrings of `ops/` give what they say."""

import doctest
import importlib

import pytest

MODULES = [
  'adopt',
  'codecs',
  'fragments',
  'merge',
  'outer',
  'payloads',
  'pieces',
]


@pytest.mark.parametrize('name', MODULES)
def test_examples(name):
  module = importlib.import_module(f'decoupled_diloco.ops.{name}')
  result = doctest.testmod(module)
  assert result.attempted > 0
  assert result.failed == 0
