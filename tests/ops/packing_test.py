"""Tests of the patterns by which pieces are distributed over fragments."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.ops import packing
from decoupled_diloco.ops.pieces import find_pieces


def make_pieces(sizes):
  """Pieces of given sizes, by name; a pair of numbers is rows and columns."""
  shapes = {
    name: size if isinstance(size, tuple) else (size,)
    for name, size in sizes.items()
  }
  params = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in shapes.items()
  }
  return find_pieces(params, stacked=None, embedding='embed', tied=())


def names(fragments):
  return [[piece.name for piece in pieces] for pieces in fragments]


def sizes(fragments):
  return [sum(piece.size for piece in pieces) for pieces in fragments]


def test_balanced_gives_the_largest_piece_to_the_least_loaded():
  pieces = make_pieces({'a': 7, 'b': 6, 'c': 5, 'd': 4, 'e': 3})
  # 7 and 6 open the fragments; 5 goes to the 6 (11), 4 to the 7 (11), and 3 to
  # the first of the two equal ones.
  fragments = packing.distribute(pieces, 2, 'balanced')
  assert names(fragments) == [['a', 'd', 'e'], ['b', 'c']]


def test_embeddings_stay_apart_in_the_last_fragment():
  pieces = make_pieces({'a': 7, 'b': 6, 'embed': (3, 2)})
  assert names(packing.distribute(pieces, 3, 'balanced')) == [
    ['a'],
    ['b'],
    ['embed'],
  ]
  assert names(packing.distribute(pieces, 1, 'balanced')) == [
    ['a', 'b', 'embed']
  ]


def test_large_embeddings_are_cut_where_the_overall_peak_is_smallest():
  pieces = make_pieces({'a': 4, 'b': 4, 'c': 4, 'd': 4, 'embed': (20, 1)})
  # 5 fragments. Embeddings in 1: peak 20; in 2: 10; in 3 (7, 7, 6): the others
  # share 2, 8 each, so 8; in 4: the others are all in one, 16.
  fragments = packing.distribute(pieces, 5, 'balanced')
  assert sizes(fragments) == [8, 8, 7, 7, 6]
  assert names(fragments)[2:] == [
    ['embed[0:7]'],
    ['embed[7:14]'],
    ['embed[14:20]'],
  ]


def test_a_cut_may_join_the_ends_of_two_embeddings():
  pieces = make_pieces({'a': 1, 'embed1': (3, 1), 'embed2': (3, 2)})
  # Nine elements in three fragments: rows 1 1 1 | 2 | 2 2 or 1 1 1 | 2 2 | 2.
  fragments = packing.distribute(pieces, 3, 'balanced')
  assert names(fragments) == [
    ['a'],
    ['embed1', 'embed2[0:1]'],
    ['embed2[1:3]'],
  ]


def test_embeddings_alone_take_all_fragments():
  fragments = packing.distribute(make_pieces({'embed': (4, 2)}), 3, 'balanced')
  assert sizes(fragments) == [2, 4, 2]


LAYERED = {f'layers.{i}.{w}': 10 for i in range(12) for w in 'kv'}


def test_strided_gives_layer_i_to_fragment_i_modulo():
  pieces = make_pieces(LAYERED | {'embed': (999, 9), 'norm': 3})
  fragments = packing.distribute(pieces, 6, 'strided')
  for p in range(5):
    of_layers = [name for name in names(fragments)[p] if name != 'norm']
    assert of_layers == [
      f'layers.{i}.{w}' for i in range(12) if i % 5 == p for w in 'kv'
    ]
  # Layers 0 to 11 leave fragments 2 to 4 with two layers, the others three.
  assert 'norm' in names(fragments)[2]
  assert names(fragments)[5] == ['embed']


def test_layers_gives_contiguous_runs():
  pieces = make_pieces(LAYERED | {'norm': 3, 'embed': (2, 2)})
  fragments = packing.distribute(pieces, 5, 'layers')
  # 12 layers in 4 runs of 3; the norm goes to the first of the equal ones.
  assert names(fragments)[1] == [
    f'layers.{i}.{w}' for i in (3, 4, 5) for w in 'kv'
  ]
  assert sizes(fragments) == [63, 60, 60, 60, 4]


def test_pieces_without_a_layer_fill_fragments_that_have_none():
  pieces = make_pieces({'layers.0.w': 5, 'norm': 3, 'head': 9})
  for pattern in ('strided', 'layers'):
    assert names(packing.distribute(pieces, 3, pattern)) == [
      ['layers.0.w'],
      ['head'],
      ['norm'],
    ]


@pytest.mark.parametrize(
  ('sizes', 'num_fragments', 'pattern', 'message'),
  [
    ({'a': 1, 'b': 1}, 3, 'balanced', r'2 pieces; use num_fragments=2\.$'),
    ({'a': 1, 'embed': (2, 3)}, 4, 'balanced', 'num_fragments=3 or fewer'),
    (
      {'layers.0.a': 1, 'layers.1.a': 1},
      4,
      'strided',
      "use num_fragments=2 or pattern='balanced'",
    ),
    ({'embed': (9, 9)}, 2, 'layers', "or pattern='balanced'"),
    ({'a': 1}, 0, 'balanced', 'num_fragments=0 must be at least 1'),
    ({'a': 1}, 1, 'random', 'one of balanced, layers, strided'),
    ({}, 1, 'balanced', 'at least one leaf'),
  ],
)
def test_errors_give_rule_value_and_fix(sizes, num_fragments, pattern, message):
  with pytest.raises(ValueError, match=message):
    packing.distribute(make_pieces(sizes), num_fragments, pattern)


@settings(max_examples=50, deadline=None)
@given(
  st.lists(st.integers(1, 100), min_size=1, max_size=30),
  st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=0, max_size=3
  ),
  st.integers(1, 12),
)
def test_balanced_partitions_whatever_the_pieces(others, embeddings, count):
  pieces = make_pieces(
    {f'w{i}': size for i, size in enumerate(others)}
    | {f'embed{i}': shape for i, shape in enumerate(embeddings)}
  )
  rows = sum(piece.num_rows for piece in pieces if piece.is_embedding)
  count = min(count, len(others) + rows)
  fragments = packing.distribute(pieces, count, 'balanced')
  assert len(fragments) == count
  assert all(fragments)
  assert sum(sizes(fragments)) == sum(piece.size for piece in pieces)
  kinds = [{piece.is_embedding for piece in pieces} for pieces in fragments]
  assert count == 1 or all(len(kind) == 1 for kind in kinds)
  # Where the last piece was added the load was at most the mean of the others.
  own = [
    n for n, kind in zip(sizes(fragments), kinds, strict=True) if not all(kind)
  ]
  assert count == 1 or max(own) <= sum(own) / len(own) + max(others)
