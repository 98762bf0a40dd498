"""A result is kept with its question, and answers no other."""

import dataclasses

import pytest

from decoupled_diloco.chaos import kept
from tests.chaos.report_test import GOOD

ASKED = {'run': {'rounds': 100, 'pairs': ((1, 2.0),)}, 'faults': {'seed': 0}}


def test_what_was_kept_is_there_again(tmp_path):
  path = tmp_path / 'decoupled.json'
  assert kept.load(path, ASKED) is None
  kept.save(path, ASKED, GOOD)
  found = kept.load(path, ASKED)
  assert found is not None
  assert found.goodput == GOOD.goodput
  assert dict(found.faults) == dict(GOOD.faults)


def test_another_question(tmp_path):
  path = tmp_path / 'decoupled.json'
  kept.save(path, ASKED, GOOD)
  other = {'run': {**ASKED['run'], 'rounds': 200}, 'faults': {'seed': 1}}
  says = 'another config.faults.seed, config.run.rounds; choose another'
  with pytest.raises(ValueError, match=says):
    kept.load(path, other)


@pytest.mark.parametrize('text', ['', '{}', '[]', '{"result": {"goodput": 1}}'])
def test_something_else(tmp_path, text):
  path = tmp_path / 'decoupled.json'
  path.write_text(text)
  with pytest.raises(ValueError, match='remove it to run that again'):
    kept.load(path, ASKED)


def test_every_field_of_a_result_is_kept(tmp_path):
  path = tmp_path / 'a.json'
  kept.save(path, {}, GOOD)
  found = kept.load(path, {})
  assert found is not None
  for field in dataclasses.fields(GOOD):
    before, after = (getattr(each, field.name) for each in (GOOD, found))
    assert after == (list(before) if isinstance(before, tuple) else before)
