"""Config files and command lines, looked at before they are made use of.

ml_collections loads a file and sets its fields from the command line. What can
be wrong with either is found here first, and said in one sentence with the
file, the line, the rule and the closest name.
"""

import difflib
import pathlib
import re
import runpy
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

_EXAMPLE = 'configs/quickstart.py'


def check(path: str, argv: Sequence[str], flag: str = 'config') -> None:
  """Checks a config file, and the fields that a command line sets.

  Args:
    path: of the file; what follows a colon is the argument of `get_config`.
    argv: the command line.
    flag: the name of the flag.

  Raises:
    ValueError: if the file is no config, or has no such fields.
  """
  config = load(path)
  for field in overridden(argv, flag):
    _check_field(config, field, flag)


def load(path: str) -> Any:
  """What the `get_config()` of a config file returns.

  Raises:
    ValueError: if there is no such file, or it is no config.
  """
  file, colon, argument = path.partition(':')
  if not pathlib.Path(file).is_file():
    raise ValueError(
      f'--config={path} must be the path of a config file, and '
      f'{pathlib.Path(file).absolute()} is none; correct it, for example '
      f'--config={_EXAMPLE}.'
    )
  # Whatever goes wrong here does so in a file of the user's.
  try:
    get_config = runpy.run_path(file).get('get_config')
  except Exception as error:
    raise ValueError(_mistake(file, error)) from error
  if get_config is None:
    raise ValueError(
      f'{file} must define get_config(), which returns a config; see '
      f'{_EXAMPLE}.'
    )
  try:
    config = get_config(*([argument] if colon else []))
  except Exception as error:
    raise ValueError(_mistake(file, error)) from error
  if not isinstance(config, ConfigDict):
    raise ValueError(
      f'get_config() of {file} must return a config, begun with '
      f'configuring.default_config(), but returns a {type(config).__name__}; '
      f'see {_EXAMPLE}.'
    )
  return config


def overridden(argv: Iterable[str], flag: str = 'config') -> Iterator[str]:
  """The dotted fields that a command line sets.

  >>> list(overridden(['train', '--config=x.py', '--config.inner.b1=0.9']))
  ['inner.b1']
  """
  pattern = re.compile(rf'--?(?:no)?{re.escape(flag)}\.([^=]+)')
  for argument in argv:
    if argument == '--':
      return
    if found := pattern.match(argument):
      yield found[1]


def closest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
  """The names that somebody who wrote `name` may have meant, likeliest first.

  >>> closest('lr', ['optimizer', 'clip_norm', 'learning_rate'], 1)
  ['learning_rate']
  """

  def rank(other: str) -> tuple[bool, bool, float]:
    initials = ''.join(part[:1] for part in other.split('_'))
    letters = iter(other)
    is_abbreviation = all(letter in letters for letter in name)
    ratio = difflib.SequenceMatcher(None, name, other).ratio()
    return initials != name, not is_abbreviation, -ratio

  return sorted(names, key=rank)[:count]


def unknown_field(section: str, name: str, names: Iterable[str]) -> str:
  """What to say of a field that is not there.

  Args:
    section: where it was looked for, such as 'config.inner'.
    name: what was looked for.
    names: what is there.
  """
  names = sorted(names)
  if not names:
    return f'{section} has no field {name!r}; set it in the config file.'
  if len(names) <= 3:
    return f'{section} has no field {name!r}; there are {", ".join(names)}.'
  return (
    f'{section} has no field {name!r}; the closest of its {len(names)} fields '
    f'are {", ".join(closest(name, names))}.'
  )


def _check_field(config: ConfigDict, field: str, flag: str) -> None:
  section, value = flag, config
  for part in field.split('.'):
    name = part.partition('[')[0]  # Of a list, an element can be set.
    if not isinstance(value, ConfigDict):
      raise ValueError(
        f'{section}={value!r} is a field without fields of its own, and '
        f'--{flag}.{field} asks for its {name!r}; set {section} itself.'
      )
    if name not in value:
      raise ValueError(unknown_field(section, name, value.keys()))
    # Not config[name], which takes a placeholder for a mistake.
    section, value = f'{section}.{name}', value.get(name)


def _mistake(file: str, error: Exception) -> str:
  """Where in a config file an error came from, and what it was."""
  if isinstance(error, SyntaxError):
    return f'{error.filename}, line {error.lineno}: {error.msg}; mend it.'
  # The text of a KeyError is the repr of its argument.
  text = str(error.args[0] if isinstance(error, KeyError) else error)
  what = _unknown_key(text) or f'{type(error).__name__}: {text}'
  frames = traceback.extract_tb(error.__traceback__)
  ours = [frame for frame in frames if _is_same(frame.filename, file)]
  where = f', line {ours[-1].lineno} ({ours[-1].line})' if ours else ''
  return f'{file}{where}: {what}'


def _unknown_key(text: str) -> str | None:
  """Our own words for what a locked ConfigDict says of an unknown field."""
  found = re.search(r'Key "(\w+)" does not exist .*fields present: (.*)', text)
  if found is None:
    return None
  # Quoted once more where the KeyError has become an AttributeError.
  names = re.findall(r"'(\w+)\\?':", found[2])
  return unknown_field('this section', found[1], names)


def _is_same(one: str, other: str) -> bool:
  return pathlib.Path(one).resolve() == pathlib.Path(other).resolve()
