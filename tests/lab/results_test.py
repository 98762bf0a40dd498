"""Results are kept as they come, and survive a kill."""

import pytest

from decoupled_diloco.lab.results import Results


def test_what_was_added_is_there_again(tmp_path):
  path = tmp_path / 'runs' / 'results.jsonl'
  results = Results(path)
  assert 'a' not in results
  results.add('a', {'loss': 1.25})
  results.add('b', {'loss': 0.5, 'curve': [[1, 2.0]]})
  again = Results(path)
  assert len(again) == 2
  assert again.get('a') == {'key': 'a', 'loss': 1.25}
  assert again.get('b') == {'key': 'b', 'loss': 0.5, 'curve': [[1, 2.0]]}
  assert again.get('c') is None


def test_a_torn_last_line_is_a_run_to_be_done_again(tmp_path):
  path = tmp_path / 'results.jsonl'
  Results(path).add('a', {'loss': 1.0})
  with path.open('a') as file:
    file.write('{"key": "b", "lo')
  results = Results(path)
  assert 'a' in results
  assert 'b' not in results
  results.add('b', {'loss': 2.0})
  assert len(Results(path)) == 2


def test_another_file_is_left_alone(tmp_path):
  path = tmp_path / 'results.jsonl'
  path.write_text('a diary\nof many days\n')
  with pytest.raises(ValueError, match='one result per line'):
    Results(path)
  assert path.read_text() == 'a diary\nof many days\n'
