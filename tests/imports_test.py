"""Which part of the package may import what: arrows point one way only.

The protocol decides, the ops compute, the shells do. Neither of the first two
knows the other, and only the entry points know configuration files.
"""

import ast
import pathlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

PACKAGE = 'decoupled_diloco'
ROOT = pathlib.Path(__file__).parents[1] / PACKAGE

# What the bottom of the protocol consists of: records, without any decision.
RECORDS = tuple(
  f'protocol.{name}' for name in ('messages', 'events', 'effects', 'records')
)
# Entry points, and what puts configurations into their hands, may import all.
TOP = (
  *('train', 'lab', 'chaos', 'watch', 'report', 'compile', 'generate'),
  *('simulate.__main__', 'entry', 'local_run', 'roles', 'configuring'),
  *('building', 'command', 'config_files', 'learner_role', 'measuring'),
  *('final_model', 'overrides', 'run_folder', 'run_options', 'run_result'),
  *('stopping', 'syncer_role'),
  *('auditing', 'replaying', 'watching'),
)
# Imported by the top only.
FOR_THE_TOP = ('configuring', 'ml_collections', 'absl')


class Rule(NamedTuple):
  """What a part may import, besides itself and the standard library.

  Attributes:
    ours: parts of this package, or single modules of it.
    theirs: libraries; None for any but those that are for the top.
  """

  ours: tuple[str, ...]
  theirs: tuple[str, ...] | None


RULES = {
  'protocol': Rule((), ()),
  'ops': Rule((), ('jax', 'jaxtyping', 'numpy', 'optax')),
  'models': Rule(
    ('ops.array_types',), ('flax', 'jax', 'jaxtyping', 'numpy', 'optax')
  ),
  'tasks': Rule(
    ('models', 'ops.array_types'),
    ('flax', 'jax', 'jaxtyping', 'numpy', 'optax'),
  ),
  'data': Rule(
    (), ('datasets', 'etils', 'grain', 'jaxtyping', 'numpy', 'tokenizers')
  ),
  'training': Rule(('ops', 'models', 'tasks', 'data'), None),
  'transport': Rule(RECORDS, None),
  'storage': Rule(RECORDS, None),
  'observe': Rule(RECORDS, None),
  'runtime': Rule(
    ('protocol', 'ops', 'training', 'transport', 'storage'), None
  ),
  # What a tape tells is told by the same functions as of a real run.
  'virtual': Rule(
    (
      *('protocol', 'ops', 'training', 'tasks', 'simulate'),
      *('observe.goodput', 'observe.status', 'observe.tape_lines'),
    ),
    None,
  ),
  'simulate': Rule(('protocol',), ('numpy',)),
}


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
  """The modules that a source imports, wherever in it, with their lines.

  Args:
    source: Python code.
    module: its dotted name, to which relative imports refer.
  """
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      start = node.module or ''
      if node.level:
        parent = module.split('.')[: -node.level]
        start = '.'.join([*parent, *filter(None, [node.module])])
      # `from package import part` imports the part.
      for alias in node.names:
        yield node.lineno, f'{start}.{alias.name}'


def _is_within(name: str, part: str) -> bool:
  return name == part or name.startswith(f'{part}.')


def violations(source: str, module: str) -> list[str]:
  """The imports of a module that the rules do not allow.

  Args:
    source: its code.
    module: its dotted name inside the package, such as 'protocol.pace'.
  """
  if any(_is_within(module, top) for top in TOP):
    return []
  part = module.split('.')[0]
  rule = RULES.get(part, Rule((), None))
  found = []
  for line, name in imports(source, f'{PACKAGE}.{module}'):
    if _is_within(name, PACKAGE):
      ours = name.removeprefix(PACKAGE).removeprefix('.')
      allowed = (part, *rule.ours)
      # The package's own front may name all that it offers.
      is_allowed = part == '__init__' or any(
        _is_within(ours, other) for other in allowed
      )
      is_allowed = is_allowed and not _is_within(ours, 'configuring')
    else:
      library = name.split('.')[0]
      is_known = rule.theirs is None or library in rule.theirs
      is_allowed = library in sys.stdlib_module_names or (
        is_known and library not in FOR_THE_TOP
      )
    if not is_allowed:
      found.append(f'{module}, line {line}: imports {name}')
  return found


def _modules() -> list[str]:
  paths = sorted(ROOT.rglob('*.py'))
  names = ['.'.join(p.relative_to(ROOT).with_suffix('').parts) for p in paths]
  return [name for name in names if not name.endswith('_pb2')]


def _source(module: str) -> str:
  path = ROOT.joinpath(*module.split('.')).with_suffix('.py')
  return path.read_text(encoding='utf-8')


def test_there_are_modules():
  assert {'protocol.syncer', 'ops.merge', 'transport.wire'} <= set(_modules())


@pytest.mark.parametrize('module', _modules())
def test_imports_follow_the_rules(module):
  assert violations(_source(module), module) == []


def test_every_part_has_a_rule():
  parts = {module.split('.')[0] for module in _modules()}
  known = {name.split('.')[0] for name in (*RULES, *TOP)} | {'__init__'}
  assert parts <= known


@pytest.mark.parametrize(
  ('module', 'source'),
  [
    ('protocol.pace', 'import jax'),
    ('protocol.pace', 'import numpy as np'),
    ('protocol.pace', 'from decoupled_diloco.ops import merge'),
    ('protocol.pace', 'from decoupled_diloco import ops'),
    ('protocol.pace', 'from ..ops import merge'),
    ('protocol.pace', 'from .. import transport'),
    ('protocol.pace', 'def f():\n  from decoupled_diloco.ops import merge'),
    ('ops.merge', 'import decoupled_diloco.protocol.weights'),
    ('ops.merge', 'import flax'),
    ('data.pipeline', 'import jax'),
    ('transport.wire', 'from decoupled_diloco.protocol.syncer import x'),
    ('transport.wire', 'from decoupled_diloco.protocol import syncer'),
    ('transport.wire', 'from decoupled_diloco.runtime import launch'),
    ('observe.tape', 'from decoupled_diloco.transport import wire'),
    ('simulate.engine', 'from decoupled_diloco.ops import merge'),
    ('simulate.engine', 'import jax'),
    ('simulate.engine', 'from decoupled_diloco.virtual import cluster'),
    ('virtual.cluster', 'from decoupled_diloco.runtime import launch'),
    ('virtual.cluster', 'from decoupled_diloco.observe import screen'),
    ('virtual.cluster', 'from decoupled_diloco.observe.tape import read_tape'),
    ('runtime.launch', 'from decoupled_diloco.virtual import cluster'),
    ('runtime.launch', 'from decoupled_diloco.configuring import load'),
    ('runtime.launch', 'from decoupled_diloco import configuring'),
    ('runtime.launch', 'from ml_collections import config_dict'),
    ('training.step', 'from absl import flags'),
    ('__init__', 'from decoupled_diloco.configuring import load'),
  ],
)
def test_a_wrong_arrow_is_found(module, source):
  assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
  ('module', 'source'),
  [
    ('protocol.pace', 'import dataclasses\nfrom collections.abc import Set'),
    ('protocol.pace', 'from decoupled_diloco.protocol import grace, rounds'),
    ('protocol.pace', 'from . import grace'),
    ('ops.merge', 'import jax.numpy as jnp\nfrom jaxtyping import Array'),
    ('observe.tape', 'from decoupled_diloco.protocol.records import to_json'),
    ('observe.tape', 'from decoupled_diloco.protocol import messages'),
    ('training.step', 'from decoupled_diloco.ops import fragments'),
    ('virtual.cluster', 'from decoupled_diloco.simulate.engine import Engine'),
    ('virtual.result', 'from decoupled_diloco.observe import status'),
    ('train', 'from absl import app\nimport decoupled_diloco.configuring'),
    ('__init__', 'from decoupled_diloco.ops.merge import weighted_mean'),
  ],
)
def test_right_arrows_are_left_alone(module, source):
  assert violations(source, module) == []
