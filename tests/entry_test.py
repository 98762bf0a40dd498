"""Command lines, and how a process says that it cannot go on."""

import errno

import pytest
from absl import flags
from ml_collections import config_flags

from decoupled_diloco import configuring, entry
from decoupled_diloco.runtime.launch_options import EXIT_USAGE, LaunchError

CONFIG = 'tests/integration/small_config.py'

# ml_collections loads files in an old way.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')


@pytest.fixture
def given(monkeypatch):
  """Flags of a program of its own, with a config."""
  values = flags.FlagValues()
  monkeypatch.setattr(flags, 'FLAGS', values)
  config_flags.DEFINE_config_file('config', flag_values=values)
  flags.DEFINE_integer('number', 3, 'A number.', flag_values=values)

  def parse(*arguments: str) -> flags.FlagValues:
    # ml_collections looks for the fields there.
    monkeypatch.setattr('sys.argv', ['train', *arguments])
    entry.parse_flags(['train', *arguments], 'How to use it.')
    return values

  return parse


def test_fields_are_set(given):
  values = given(f'--config={CONFIG}', '--config.model.width=48', '--number=4')
  assert values.config.model.width == 48
  assert values.number == 4
  assert configuring.options_of(values.config).model.width == 48


@pytest.mark.parametrize(
  ('arguments', 'says'),
  [
    (('--config=no_such.py',), r'--config=no_such.py must be the path'),
    (('--config', 'no_such.py'), r'--config=no_such.py must be the path'),
    (('--config=',), '--config= must be the path'),
    ((f'--config={CONFIG}', '--config.inner.lr=1'), 'config.inner has no'),
    (
      (f'--config={CONFIG}', '--config.model.width=wide'),
      "width=wide: .*'wide'; give a value of the type",
    ),
    ((f'--config={CONFIG}', '--config.model=1'), 'config.model=1.*the type'),
    (('--number=x',), 'number=x'),
    (('--no_such=1',), 'no_such'),
    (('word', 'another'), "'word another' is no flag"),
  ],
)
def test_mistakes(given, arguments, says):
  with pytest.raises(ValueError, match=says):
    given(*arguments)


def test_help(given, capsys):
  with pytest.raises(SystemExit) as caught:
    given('--help')
  assert caught.value.code == 0
  assert capsys.readouterr().out == 'How to use it.\n'


@pytest.mark.parametrize(
  ('error', 'line'),
  [
    (ValueError('a=1 must\n  be 2.'), 'a=1 must be 2.'),
    (OSError(errno.ENOENT, 'No such file', '/x'), '/x: No such file'),
    (OSError('a sentence.'), 'a sentence.'),
  ],
)
def test_what_goes_wrong_at_first_is_the_users_to_mend(error, line, capsys):
  told = []
  with pytest.raises(SystemExit) as caught, entry.setting_up(told.append):
    raise error
  assert caught.value.code == EXIT_USAGE
  assert capsys.readouterr().err == f'error: {line}\n'
  assert told == [f'error: {line}']


@pytest.mark.parametrize(
  ('error', 'code'),
  [
    (LaunchError('no learner'), 1),
    (LaunchError('a bad port', EXIT_USAGE), EXIT_USAGE),
    (OSError('full'), 1),
    (FloatingPointError('not finite'), 1),
  ],
)
def test_foreseen_failures_at_work(error, code, capsys):
  with pytest.raises(SystemExit) as caught, entry.at_work():
    raise error
  assert caught.value.code == code
  assert capsys.readouterr().err == f'error: {error}\n'


@pytest.mark.parametrize('guard', [entry.setting_up, entry.at_work])
def test_a_bug_keeps_its_traceback(guard):
  with pytest.raises(KeyError), guard():
    raise KeyError('a bug')


def test_a_value_error_at_work_is_a_bug():
  with pytest.raises(ValueError, match='a bug'), entry.at_work():
    raise ValueError('a bug')


def test_where_nothing_can_be_written_the_code_still_says_it(monkeypatch):
  class Full:
    def write(self, text):
      raise OSError(errno.ENOSPC, 'No space left on device')

    flush = write

  monkeypatch.setattr('sys.stderr', Full())
  with pytest.raises(SystemExit) as caught:
    entry.leave('the disk is full', 1)
  assert caught.value.code == 1
