"""Config files and command lines with mistakes in them."""

import re

import pytest

from decoupled_diloco import config_files

BEGIN = """
from decoupled_diloco import configuring
def get_config(width='64'):
  config = configuring.default_config()
"""
GOOD = f'{BEGIN}  config.model.width = int(width)\n  return config\n'


@pytest.fixture
def write(tmp_path):
  """Writes a config file; returns its path."""

  def write_file(text: str) -> str:
    path = tmp_path / 'some.py'
    path.write_text(text)
    return str(path)

  return write_file


def test_a_config_is_what_get_config_returns(write):
  path = write(GOOD)
  assert config_files.load(path).model.width == 64
  assert config_files.load(f'{path}:32').model.width == 32


@pytest.mark.parametrize(
  ('text', 'says'),
  [
    ('def get_config(:\n', 'some.py, line 1: invalid syntax'),
    ('\nimport no_such\n', 'some.py, line 2 (import no_such): ModuleNotFound'),
    ('x = 1\n', 'must define get_config()'),
    ('def get_config():\n  return 1 / 0\n', 'line 2 (return 1 / 0): ZeroDiv'),
    ('def get_config():\n  return {}\n', 'returns a dict; see configs/'),
    ('def get_config():\n  pass\n', 'returns a NoneType'),
    ('def get_config(name):\n  return name\n', 'missing 1 required'),
    (
      f'{BEGIN}  config.inner.lr = 3\n',
      "line 5 (config.inner.lr = 3): this section has no field 'lr'; the "
      'closest of its 11 fields are learning_rate',
    ),
    (f"{BEGIN}  config.outer.gain = 'a'\n", "line 5 (config.outer.gain = 'a')"),
    ('def get_config():\n  return {}["a"]\n', 'KeyError: a'),
  ],
)
def test_a_mistake_is_named_with_its_line(write, text, says):
  with pytest.raises(ValueError, match=re.escape(says)) as error:
    config_files.load(write(text))
  assert 'some.py' in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('path', ['no_such.py', 'configs', ''])
def test_what_is_no_file(path):
  with pytest.raises(ValueError, match=r'must be the path of a config file'):
    config_files.load(path)


@pytest.mark.parametrize(
  ('argument', 'says'),
  [
    ('inner.lr=1', "config.inner has no field 'lr'; .*learning_rate"),
    ('iner.b1=1', "config has no field 'iner'; .*inner"),
    ('inner.b1.x=1', r"config.inner.b1=0.9 is a field without .* 'x'"),
    ('learners.0.mesh=1', "config.learners has no field '0'; set it in the"),
    ('nothing', "no field 'nothing'"),
  ],
)
def test_a_field_that_is_not_there(write, argument, says):
  with pytest.raises(ValueError, match=says):
    config_files.check(write(GOOD), ['train', f'--config.{argument}'])


def test_fields_that_are_there(write):
  argv = ['train', '--config=x', '-config.seed=1', '--config.launch.kill[0]=1']
  config_files.check(write(GOOD), [*argv, '--', '--config.no=1'])
  # A field that may be None, and is.
  config_files.check(write(GOOD), ['train', '--config.data.cache_dir=/x'])


def test_the_closest_names():
  names = ['clip_norm', 'learning_rate', 'final_fraction', 'b1']
  assert config_files.closest('lr', names, 1) == ['learning_rate']
  assert config_files.closest('learn_rate', names, 1) == ['learning_rate']
  assert config_files.closest('norm', names, 1) == ['clip_norm']


@pytest.mark.parametrize(
  ('names', 'says'),
  [
    ([], 'set it in the config file'),
    (['b', 'a'], 'there are a, b'),
    (['one', 'two', 'three', 'four'], 'the closest of its 4 fields are'),
  ],
)
def test_what_is_said_of_an_unknown_field(names, says):
  assert says in config_files.unknown_field('config', 'x', names)
