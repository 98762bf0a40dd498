"""What a user can get wrong on the command line: a sentence and a code."""

import re
import socket
from typing import NamedTuple

import pytest

from tests.integration.real_runs import command

QUICKSTART = '--config=configs/quickstart.py'


class _Mistake(NamedTuple):
  """Arguments, and what the one sentence must say: rule, value and fix."""

  name: str
  arguments: tuple[str, ...]
  says: tuple[str, ...]
  code: int = 2


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return listener.getsockname()[1]


MISTAKES = (
  _Mistake('no config', (), ('no config', '--config=')),
  _Mistake(
    'missing config file',
    ('--config=configs/no_such.py',),
    ('config', 'no_such.py'),
  ),
  _Mistake('unknown flag', (QUICKSTART, '--no_such_flag=1'), ('no_such_flag',)),
  _Mistake(
    'unknown field',
    (QUICKSTART, '--config.budjet=3'),
    ("config has no field 'budjet'", 'budget'),
  ),
  _Mistake(
    'unknown field of a section',
    (QUICKSTART, '--config.inner.lr=3'),
    ("config.inner has no field 'lr'", 'learning_rate'),
  ),
  _Mistake(
    'wrong type',
    (QUICKSTART, '--config.schedule.sync_every=often'),
    ('sync_every', 'often'),
  ),
  _Mistake(
    'H not a multiple of P',
    (QUICKSTART, '--config.schedule.sync_every=25'),
    ('sync_every=25', 'multiple of num_fragments=6', '24, 30'),
  ),
  _Mistake(
    'K_min above M',
    (QUICKSTART, '--config.quorum.min_learners=4'),
    ('min_learners=4', 'num_learners=3'),
  ),
  _Mistake(
    'unknown role',
    (QUICKSTART, '--config.role=boss'),
    ("role='boss'", 'local, syncer, learner'),
  ),
  _Mistake(
    'no corpus there',
    (QUICKSTART, '--config.data.source=/nowhere/*.txt'),
    ('/nowhere/*.txt',),
  ),
  _Mistake(
    'mesh larger than the devices',
    (QUICKSTART, '--config.role=learner', '--config.mesh.data=64'),
    ('data=64', 'devices'),
  ),
  _Mistake(
    'batch that the mesh does not divide',
    (QUICKSTART, '--config.role=learner', '--config.mesh.data=3'),
    ('data=3',),
  ),
  _Mistake(
    'no syncer there',
    (
      QUICKSTART,
      '--config.role=learner',
      f'--config.syncer.address=127.0.0.1:{_free_port()}',
      '--config.syncer.connect_seconds=1',
    ),
    ('no syncer', 'syncer.address'),
    code=1,  # It may be there later: a launcher would try again.
  ),
  _Mistake(
    'an unknown pattern',
    (QUICKSTART, '--config.fragments.pattern=balancd'),
    ('balancd', 'balanced'),
  ),
  _Mistake(
    'a bucket as workdir',
    (QUICKSTART, '--config.workdir=gs://bucket/run'),
    ('gs://bucket/run', 'local folder'),
  ),
  _Mistake(
    'fewer rounds in flight than the overlap',
    (QUICKSTART, '--config.lead.max_rounds_in_flight=2'),
    ('max_rounds_in_flight=2', 'overlap_scans=2'),
  ),
  _Mistake(
    'another address without TLS',
    (QUICKSTART, '--config.role=syncer', '--config.syncer.address=0.0.0.0:0'),
    ('0.0.0.0', 'TLS', 'insecure'),
  ),
  _Mistake(
    'unknown codec',
    (QUICKSTART, '--config.wire.up=int3'),
    ('int3', 'int4'),
  ),
  _Mistake(
    'more fragments than pieces',
    (
      QUICKSTART,
      '--config.role=syncer',
      '--config.schedule.num_fragments=600',
      '--config.schedule.sync_every=600',
    ),
    ('num_fragments=600',),
  ),
  _Mistake(
    'a task that is none',
    (QUICKSTART, '--config.task=os:getcwd'),
    ('os:getcwd', 'package.module:function', 'correct it'),
  ),
  _Mistake(
    'kills of a wrong shape',
    (QUICKSTART, '--config.launch.kill=(1,0.2)'),
    ('kill=(1, 0.2)', 'pairs', '((2, 0.4),)'),
  ),
  _Mistake(
    'no workdir',
    (QUICKSTART, '--config.workdir='),
    ("workdir=''", 'runs/default'),
  ),
  _Mistake(
    'a file as workdir',
    (QUICKSTART, '--config.workdir=README.md'),
    ('README.md is a file', 'choose another'),
  ),
  _Mistake(
    'too little text',
    (QUICKSTART, '--config.role=syncer', '--config.data.source=LICENSE'),
    ('config.data', 'use more text', 'evaluation.batches'),
  ),
  _Mistake(
    'a config file that is no config',
    ('--config=README.md',),
    ('README.md, line 1', 'mend it'),
  ),
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
  'mistake', MISTAKES, ids=[mistake.name for mistake in MISTAKES]
)
def test_a_mistake_ends_with_one_sentence(mistake, tmp_path):
  workdir = f'--config.workdir={tmp_path}/run'
  config, *others = mistake.arguments or ('',)
  # A mistake of its own wins.
  arguments = (config, workdir, *others) if mistake.arguments else ()
  process = command(*arguments)
  _, errors = process.communicate(timeout=100)
  assert process.returncode == mistake.code, errors
  assert 'Traceback' not in errors
  last = errors.strip().splitlines()[-1]
  assert re.match(r'error: \S', last)
  for words in mistake.says:
    assert words in last
