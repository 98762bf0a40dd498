import collections.abc
import dataclasses
import json
import math
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.protocol.events import PayloadFacts, TimePassed
from decoupled_diloco.protocol.messages import Reason, Refusal
from decoupled_diloco.protocol.records import (
  Record,
  from_json,
  to_json,
)


def _values(hint: Any) -> st.SearchStrategy:
  """Any value that a field of this type may hold."""
  if hint is float:
    return st.floats(allow_nan=False, allow_infinity=False)
  if get_origin(hint) is tuple:
    return st.lists(_values(get_args(hint)[0]), max_size=3).map(tuple)
  if get_origin(hint) in (Union, types.UnionType):
    return st.one_of([_values(each) for each in get_args(hint)])
  if get_origin(hint) is frozenset:
    return st.frozensets(_values(get_args(hint)[0]), max_size=3)
  if get_origin(hint) is collections.abc.Mapping:
    key, value = map(_values, get_args(hint))
    return st.dictionaries(key, value, max_size=2)
  if isinstance(hint, type) and (
    dataclasses.is_dataclass(hint) or hasattr(hint, '_fields')
  ):
    hints = get_type_hints(hint)
    return st.builds(hint, **{name: _values(hints[name]) for name in hints})
  return st.from_type(hint)


@pytest.mark.parametrize(
  'kind', get_args(Record), ids=lambda kind: kind.__name__
)
def test_every_record_survives_one_line_of_json(kind):
  @settings(max_examples=20)
  @given(_values(kind))
  def check(record):
    line = to_json(record)
    assert '\n' not in line
    back = from_json(line)
    assert back == record
    # This tells 1 from 1.0 and 0.0 from -0.0, which == does not.
    assert to_json(back) == line

  check()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_exact(now):
  back = from_json(to_json(TimePassed(now)))
  assert isinstance(back, TimePassed)
  assert back.now == now
  assert math.copysign(1, back.now) == math.copysign(1, now)


def test_the_type_comes_first():
  assert to_json(TimePassed(1.5)) == '{"type":"TimePassed","now":1.5}'


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_written(value):
  with pytest.raises(ValueError, match='which JSON cannot; use None'):
    to_json(PayloadFacts(8, norm=value))


@pytest.mark.parametrize('value', ['NaN', 'Infinity', '-Infinity', '1e999'])
def test_what_is_not_finite_is_not_read(value):
  with pytest.raises(ValueError, match='null stands for none'):
    from_json(f'{{"type":"TimePassed","now":{value}}}')


@pytest.mark.parametrize(
  'line',
  [
    '',
    'null',
    '[]',
    '3',
    '"TimePassed"',
    '{}',
    '{"type":"TimePassed"}',
    '{"type":"TimePassed","now":1.0',
    '{"type":"TimePassed","now":1.0}{}',
    '{"type":"TimePassed","now":1.0,"then":2.0}',
    '{"type":"Teatime","now":1.0}',
    '{"type":7,"now":1.0}',
    '{"type":["TimePassed"],"now":1.0}',
    '{"type":"Refusal"}',
    '{"type":"MessageArrived","now":1.0,"message":{"type":"Teatime"}}',
  ],
)
def test_garbage_is_a_value_error(line):
  with pytest.raises(ValueError):
    from_json(line)


@given(st.text())
def test_arbitrary_text_is_a_value_error(line):
  with pytest.raises(ValueError):
    from_json(line)


@given(st.data())
def test_a_missing_or_foreign_member_is_a_value_error(data):
  kind = data.draw(st.sampled_from(get_args(Record)))
  value = json.loads(to_json(data.draw(_values(kind))))
  required = [
    field.name
    for field in dataclasses.fields(kind)
    if field.default is dataclasses.MISSING
  ]
  if data.draw(st.booleans()):
    value['foreign'] = 1
  else:
    del value[data.draw(st.sampled_from(required))]
  with pytest.raises(ValueError):
    from_json(json.dumps(value))


def test_an_unknown_reason_is_a_value_error():
  line = to_json(Refusal(2, 7, 1, 1, Reason.LATE, 'closed'))
  with pytest.raises(ValueError, match='tired'):
    from_json(line.replace('"late"', '"tired"'))
