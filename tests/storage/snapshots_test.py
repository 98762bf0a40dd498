"""Checkpoints: whole, or not there."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from decoupled_diloco.models.transformer import TransformerOptions
from decoupled_diloco.storage import snapshots
from decoupled_diloco.tasks import language_model_task
from decoupled_diloco.training.mesh import MeshOptions, make_mesh, shardings


class Pair(NamedTuple):
  left: object
  right: object


def make_params(fill=1):
  fill = jnp.float32(fill)
  return {'a': jnp.full((2, 3), fill), 'b': {'c': fill}}


def assert_same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)

  def check(a, b):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_array_equal(a, b)

  jax.tree.map(check, got, want)


@pytest.mark.parametrize('scan_layers', [True, False])
def test_a_transformer_onto_another_mesh(tmp_path, scan_layers):
  task = language_model_task(
    TransformerOptions(
      vocab_size=32, width=16, layers=2, heads=4, scan_layers=scan_layers
    )
  )

  def lie(mesh):
    """How the parameters lie on such a mesh."""
    return shardings(task, make_mesh(MeshOptions(**mesh)))

  params = jax.jit(task.init, out_shardings=lie({'fsdp': 4, 'tensor': 2}))(
    jax.random.key(0)
  )
  path = snapshots.save(str(tmp_path / 'x'), params, {'step': 3})
  for mesh in ({}, {'tensor': 4}, {'data': 2, 'fsdp': 2, 'tensor': 2}):
    wanted = lie(mesh)
    like = jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding
      ),
      params,
      wanted,
    )
    restored = snapshots.restore(str(path), like)
    assert_same(restored.params, params)
    assert restored.description == {'step': 3}
    jax.tree.map(
      lambda leaf, sharding: (
        leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        or pytest.fail(f'{leaf.sharding} instead of {sharding}')
      ),
      restored.params,
      wanted,
    )


@pytest.mark.parametrize(
  'params',
  [
    (jnp.ones(2), [jnp.zeros(3), (jnp.ones(()),)]),
    Pair(jnp.ones(2), {'x': None, 'y': {}, 'z': jnp.ones(1)}),
    {0: jnp.ones(1), 10: jnp.ones(2), 9: jnp.ones(3)},
    {'a.b': jnp.ones(1), 'a/c': jnp.ones(2), 'a': {'b.c': jnp.ones(3)}},
    {
      'bf16': jnp.array([1.5, -0.0, jnp.inf], jnp.bfloat16),
      'bool': jnp.array([True, False]),
      'uint32': jnp.array([2**32 - 1], jnp.uint32),
      'numpy': np.arange(3, dtype=np.int8),
    },
  ],
  ids=['tuples', 'named', 'integers', 'dots', 'dtypes'],
)
def test_odd_pytrees_come_back_as_they_were(tmp_path, params):
  description = {
    'versions': [1, 2],
    'reason': 'to \u00e9ach his own',
    'x': None,
  }
  folder = str(tmp_path / 'some' / 'where')  # Made if they are not there.
  snapshots.save(folder, params, description)
  restored = snapshots.restore(folder, params)
  assert_same(restored.params, params)
  assert restored.description == description


def test_a_relative_path(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = snapshots.save('x', make_params(), {})
  assert path == epath.Path(tmp_path / 'x')
  assert_same(snapshots.restore('x', make_params()).params, make_params())


def test_a_newer_one_replaces_an_older_one(tmp_path):
  for step in range(3):
    snapshots.save(str(tmp_path / 'x'), make_params(step), {'step': step})
  restored = snapshots.restore(str(tmp_path / 'x'), make_params())
  assert_same(restored.params, make_params(2))
  assert restored.description == {'step': 2}
  assert [path.name for path in tmp_path.iterdir()] == ['x']


class DiedError(BaseException):
  """Stands for the end of the process, which nobody handles."""


def test_whoever_dies_leaves_the_old_or_the_new(tmp_path, monkeypatch):
  """At every rename and removal, whosever it is, in turn."""
  cls = type(epath.Path(tmp_path))
  left = [10**9]

  def dying(method):
    def wrapped(self, *args, **kwargs):
      if not left[0]:
        raise DiedError
      left[0] -= 1
      return method(self, *args, **kwargs)

    return wrapped

  for name in ('rename', 'replace', 'rmtree'):
    monkeypatch.setattr(cls, name, dying(getattr(cls, name)))
  folder = str(tmp_path / 'x')
  found = []
  for step in range(100):
    left[0] = 10**9
    snapshots.save(folder, make_params(0), {'step': 0})
    left[0] = step
    try:
      snapshots.save(folder, make_params(1), {'step': 1})
      is_over = True
    except DiedError:
      is_over = False
    left[0] = 10**9
    restored = snapshots.restore(folder, make_params())
    found.append(restored.description['step'])
    assert_same(restored.params, make_params(found[-1]))
    # And nobody is in the way of the next one.
    snapshots.save(folder, make_params(2), {'step': 2})
    restored = snapshots.restore(folder, make_params())
    assert_same(restored.params, make_params(2))
    if is_over:
      break
  # Once the new one is there it stays, and there were several ways to die.
  assert found == sorted(found)
  assert found.count(0) >= 2 and found.count(1) >= 2


def test_an_unfinished_one_is_never_chosen(tmp_path, monkeypatch):
  folder = tmp_path / 'x'

  def die(self, target):
    raise DiedError(target)

  cls = type(epath.Path(tmp_path))
  with monkeypatch.context() as patch:
    patch.setattr(cls, 'rename', die)
    patch.setattr(cls, 'replace', die)
    with pytest.raises(DiedError):
      snapshots.save(str(folder), make_params(), {})
  assert any(tmp_path.iterdir())  # All was written but the last stroke.
  with pytest.raises(ValueError, match=f'no checkpoint at {folder};'):
    snapshots.restore(str(folder), make_params())
  snapshots.save(str(folder), make_params(), {})
  assert_same(
    snapshots.restore(str(folder), make_params()).params, make_params()
  )


def test_a_missing_one(tmp_path):
  with pytest.raises(ValueError, match=f'no checkpoint at {tmp_path / "x"};'):
    snapshots.restore(str(tmp_path / 'x'), make_params())


@pytest.mark.parametrize(
  ('other', 'message'),
  [
    ({'a': jnp.ones((2, 3))}, r'b.c is \(\) instead of missing'),
    ({**make_params(), 'z': jnp.ones(1)}, r'z is missing instead of \(1,\)'),
    (
      {**make_params(), 'b': {'d': jnp.ones(())}},
      r'b.c is \(\) instead of missing; b.d is missing instead of \(\)',
    ),
    (
      {**make_params(), 'a': jnp.ones((2, 4))},
      r'a is \(2, 3\) instead of \(2, 4\)',
    ),
    (
      [jnp.ones(i) for i in range(1, 5)],
      r'0 is missing .* 1 is .* 2 is .* and 3 more',
    ),
  ],
  ids=['fewer', 'more', 'renamed', 'shape', 'all'],
)
def test_other_parameters(tmp_path, other, message):
  path = snapshots.save(str(tmp_path / 'x'), make_params(), {})
  with pytest.raises(ValueError) as caught:
    snapshots.restore(str(path), other)
  caught.match(
    f'{path} does not hold these parameters: {message}; use the config it was'
  )


def test_another_precision(tmp_path):
  path = snapshots.save(str(tmp_path / 'x'), make_params(), {})
  like = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params())
  assert_same(snapshots.restore(str(path), like).params, like)


@pytest.mark.parametrize('content', [[], ['params'], ['notes.txt']])
def test_a_folder_that_is_no_checkpoint(tmp_path, content):
  for name in content:
    (tmp_path / name).write_text('mine')
  with pytest.raises(ValueError, match=f'{tmp_path} does not hold'):
    snapshots.restore(str(tmp_path), make_params())


def test_nothing_but_a_checkpoint_is_replaced(tmp_path):
  notes = tmp_path / 'folder' / 'notes.txt'
  notes.parent.mkdir()
  notes.write_text('mine')
  for path in (notes.parent, notes):
    with pytest.raises(ValueError, match=f'{path} is there already and is no'):
      snapshots.save(str(path), make_params(), {})
  assert notes.read_text() == 'mine'
  (tmp_path / 'empty').mkdir()
  snapshots.save(str(tmp_path / 'empty'), make_params(), {})


def test_a_folder_that_cannot_be_made(tmp_path):
  (tmp_path / 'file').write_text('x')
  with pytest.raises(OSError, match=str(tmp_path / 'file')):
    snapshots.save(str(tmp_path / 'file' / 'x'), make_params(), {})


# As tensorstore says it, through orbax.
_STORY = (
  '{}: Error writing "a/0.0" in OCDBT database at local file "{}": '
  'Failed to write 286174 bytes to file 14: {}'
)


@pytest.mark.parametrize(
  ('error', 'why'),
  [
    (
      ValueError(
        _STORY.format('RESOURCE_EXHAUSTED', '/x', "[os_error_code='28']")
      ),
      'No space left on device',
    ),
    (ValueError(_STORY.format('PERMISSION_DENIED', 'gs://x', '403')), 'PERM'),
    (OSError(30, 'Read-only file system', '/x'), 'Read-only file system'),
  ],
)
def test_why_it_cannot_be_written(tmp_path, monkeypatch, error, why):
  older = snapshots.save(str(tmp_path / 'x'), make_params(), {})

  def fail(self, directory, **kwargs):
    unfinished = directory.with_name(f'{directory.name}.orbax-checkpoint-tmp')
    (unfinished / 'params').mkdir(parents=True)
    raise error

  monkeypatch.setattr(snapshots.ocp.Checkpointer, 'save', fail)
  says = rf'checkpoint {older} cannot be written \({why}.*\); free some space'
  with pytest.raises(OSError, match=says):
    snapshots.save(str(tmp_path / 'x'), make_params(2), {})
  # What was written of it takes no room, and the older one is still there.
  assert [path.name for path in tmp_path.iterdir()] == ['x']
  monkeypatch.undo()
  assert_same(
    snapshots.restore(str(older), make_params()).params, make_params()
  )


def test_another_mistake_is_left_as_it_is(tmp_path, monkeypatch):
  def fail(self, directory, **kwargs):
    raise ValueError('an array is empty')

  monkeypatch.setattr(snapshots.ocp.Checkpointer, 'save', fail)
  with pytest.raises(ValueError, match=r'^an array is empty$'):
    snapshots.save(str(tmp_path / 'x'), make_params(), {})
