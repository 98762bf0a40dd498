"""Tests of pieces: names, stacked layers, ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoupled_diloco.ops import pieces

LAYERS = r'(^|\.)layers($|\.)'


def find(params, **options):
  options = {'stacked': LAYERS, 'embedding': 'embed', 'tied': ()} | options
  return pieces.find_pieces(params, **options)


def names(found):
  return [piece.name for piece in found]


def test_stacked_leaves_become_one_piece_per_layer():
  found = find({'layers': {'mlp': {'w': jnp.zeros((2, 3, 4))}}})
  assert names(found) == ['layers.0.mlp.w', 'layers.1.mlp.w']
  assert [piece.shape for piece in found] == [(3, 4), (3, 4)]
  assert [piece.layer for piece in found] == [0, 1]


@pytest.mark.parametrize(
  'container', [[{'w': jnp.zeros(3)}] * 2, {0: {'w': jnp.zeros(3)}}]
)
def test_an_index_after_the_container_means_unrolled(container):
  assert all(piece.layer is None for piece in find({'layers': container}))


def test_only_the_outermost_stack_counts():
  # An unrolled decoder whose layers have a part that is called layers too.
  found = find({'layers': [{'layers': {'w': jnp.zeros((5, 3))}}]})
  assert names(found) == ['layers.0.layers.w']


def test_layer_ten_follows_layer_nine():
  found = find({'layers': {'w': jnp.zeros((11, 2)), 'b': jnp.zeros((11, 2))}})
  assert names(found)[-4:] == [
    'layers.9.b',
    'layers.9.w',
    'layers.10.b',
    'layers.10.w',
  ]


def test_rules_may_be_predicates_or_none():
  params = {'layers': {'w': jnp.zeros((2, 3))}, 'vocab': jnp.zeros(4)}
  assert names(find(params, stacked=None)) == ['layers.w', 'vocab']
  found = find(params, stacked=lambda path: False, embedding=lambda p: 'v' in p)
  assert [piece.is_embedding for piece in found] == [False, True]


def test_arrays_at_two_places_are_one_piece():
  table = jnp.zeros((4, 2))
  found = find({'embed': table, 'head': table, 'other': jnp.zeros((4, 2))})
  assert names(found) == ['embed', 'other']
  assert found[0].paths == ('embed', 'head')
  assert found[0].aliases == ('head',)
  # One of its places is an embedding, so the piece is one.
  assert found[0].is_embedding


def test_one_shape_struct_at_two_places_is_not_a_tie():
  shape = jax.ShapeDtypeStruct((4, 2), jnp.float32)
  assert names(find({'a': shape, 'b': shape})) == ['a', 'b']


def test_ties_may_be_named_and_chain():
  shape = jax.ShapeDtypeStruct((2,), jnp.float32)
  params = dict.fromkeys('abcd', shape)
  found = find(params, tied=[('c', 'b'), ('b', 'd')])
  assert [piece.paths for piece in found] == [('a',), ('b', 'c', 'd')]


def test_stacked_leaves_tie_layer_by_layer():
  w = jnp.zeros((2, 3))
  found = find({'layers': {'k': w, 'q': w}})
  assert names(found) == ['layers.0.k', 'layers.1.k']
  assert found[1].aliases == ('layers.1.q',)


@pytest.mark.parametrize(
  ('params', 'options', 'message'),
  [
    ({'a': 1.0}, {}, "'a' is a float"),
    ({'a': jax.random.key(0)}, {}, 'random keys'),
    ({'a.b': np.zeros(1), 'a': {'b': np.zeros(1)}}, {}, 'must be unique'),
    (
      {'layers': {'v': np.zeros((2, 3)), 'w': np.zeros((3, 3))}},
      {},
      r"'layers\.v' has 2 and 'layers\.w' has 3",
    ),
    ({'a': np.zeros(1)}, {'tied': [('a', 'b')]}, "there is no 'b'"),
    (
      {'a': np.zeros(1), 'b': np.zeros(2)},
      {'tied': [('a', 'b')]},
      r'float64\[1\].*float64\[2\]',
    ),
  ],
)
def test_errors_name_the_leaf(params, options, message):
  with pytest.raises(ValueError, match=message):
    find(params, **options)


def test_rows_of_a_piece():
  (piece,) = find({'embed': jnp.zeros((6, 2))})
  block = piece.with_rows(2, 5)
  assert (block.name, block.shape, block.size) == ('embed[2:5]', (3, 2), 6)
  assert piece.with_rows(0, 6) is piece
