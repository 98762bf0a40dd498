"""Fragments: the fixed sets of parameter pieces that synchronise as one unit.

`fragment` decides once, deterministically, which piece belongs to which
fragment; a `FragmentPlan` then cuts fragments out of parameters and writes them
back. The plan of a scanned and of an unrolled model have the same pieces, the
same fragments and the same digest.

Reference: Streaming DiLoCo (Douillard et al., arXiv 2501.18512, section 2.2);
Decoupled DiLoCo (Douillard et al., arXiv 2604.21428).
"""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decoupled_diloco.ops import packing
from decoupled_diloco.ops.array_types import (
  AnyLeaf,
  Params,
  PieceValues,
  ShapeTree,
  StackedParams,
)
from decoupled_diloco.ops.pieces import (
  PathRule,
  Piece,
  find_pieces,
  named_leaves,
)

_DIGEST_FORMAT = 'decoupled_diloco fragments 1'


def fragment(
  params: ShapeTree,
  num_fragments: int = 24,
  pattern: str = 'balanced',
  *,
  stacked: PathRule = r'(^|\.)layers($|\.)',
  embedding: PathRule = r'embed',
  tied: Iterable[Iterable[str]] = (),
) -> 'FragmentPlan':
  """Partitions parameters into fragments; every element is in exactly one.

  Patterns, for `P` fragments of which the embeddings take the last (if there
  are none, the other pieces share all `P`):

  - `balanced`: greedy bin packing by size. The peak is at most 4/3 of the
    smallest possible one, hence of the mean unless pieces are too few or too
    large for that. Embeddings that would be the peak are cut into row blocks
    over as many fragments as make the overall peak smallest.
  - `strided`: layer i belongs to fragment i mod (P - 1). Pieces without a layer
    go where they balance the sizes.
  - `layers`: contiguous runs of layers of about equal size; pieces without a
    layer likewise.

  Example:

  >>> import jax, jax.numpy as jnp
  >>> params = {
  ...   'embed': jnp.zeros((8, 2)),
  ...   'layers': {'w': jnp.zeros((4, 3, 3))},  # 4 layers, stacked
  ... }
  >>> plan = fragment(params, num_fragments=3)
  >>> [plan.names(p) for p in range(3)]
  [('layers.0.w', 'layers.2.w'), ('layers.1.w', 'layers.3.w'), ('embed',)]
  >>> plan.sizes
  (18, 18, 16)

  Args:
    params: pytree of arrays or of `jax.ShapeDtypeStruct`s.
    num_fragments: `P`, at least 1.
    pattern: 'balanced', 'strided' or 'layers'.
    stacked: containers whose leaves stack the layers along axis 0, as a regular
      expression searched in the container's dotted path, a predicate on that
      path, or None. A container is taken as unrolled where an integer follows
      it (`layers.0.w`).
    embedding: which pieces are embeddings, by canonical name (`layers.0.w`).
    tied: groups of leaf paths that hold one parameter, e.g.
      `(('embed.table', 'head.kernel'),)`. Places that hold the same array
      object are tied without being named; with shape structs, name them.

  Raises:
    ValueError: more fragments than pieces, an unknown pattern, stacked leaves
      that disagree about the number of layers, or ties that cannot be.
  """
  pieces = find_pieces(params, stacked=stacked, embedding=embedding, tied=tied)
  return FragmentPlan(packing.distribute(pieces, num_fragments, pattern))


@dataclasses.dataclass(frozen=True)
class FragmentPlan:
  """Which piece of the parameters is in which fragment.

  Immutable and hashable: a static argument of jitted functions. Methods that
  take `params` accept any pytree with the leaf paths and shapes that the plan
  was made from, arrays as well as tracers, however sharded (over mesh axes of
  type Auto: layers and rows may be cut across shards). `p` is static.
  """

  fragments: tuple[tuple[Piece, ...], ...]

  def __hash__(self) -> int:
    # Plans of one digest that differ are told apart by equality.
    return hash(self.digest)

  @property
  def num_fragments(self) -> int:
    return len(self.fragments)

  @functools.cached_property
  def sizes(self) -> tuple[int, ...]:
    """Elements per fragment."""
    return tuple(
      sum(piece.size for piece in pieces) for pieces in self.fragments
    )

  @property
  def num_elements(self) -> int:
    """Elements of all fragments; tied parameters count once."""
    return sum(self.sizes)

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256, in hex, of names, shapes, dtypes, ties, rules and assignment.

    Two parties whose plans have one digest mean the same by every fragment. It
    does not depend on sharding, on stacking, or on whether the plan was made
    from arrays or from shapes.
    """
    layout = [
      [[q.name, q.aliases, q.shape, q.dtype, q.is_embedding] for q in pieces]
      for pieces in self.fragments
    ]
    text = json.dumps([_DIGEST_FORMAT, layout], separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()

  def pieces(self, p: int) -> tuple[Piece, ...]:
    """The pieces of fragment `p`, in the order of all their values."""
    if not 0 <= p < self.num_fragments:
      raise ValueError(
        f'Fragment {p} must be one of 0 to {self.num_fragments - 1}.'
      )
    return self.fragments[p]

  def names(self, p: int) -> tuple[str, ...]:
    """Canonical names of the pieces of fragment `p`."""
    return tuple(piece.name for piece in self.pieces(p))

  def shapes(self, p: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of the pieces of fragment `p`."""
    return tuple(
      jax.ShapeDtypeStruct(piece.shape, jnp.dtype(piece.dtype))
      for piece in self.pieces(p)
    )

  def is_embedding(self, p: int) -> bool:
    """Whether fragment `p` consists of embeddings only."""
    return all(piece.is_embedding for piece in self.pieces(p))

  def take(self, params: Params, p: int) -> PieceValues:
    """The values of fragment `p`: layer slices and row blocks cut out."""
    leaves = named_leaves(params)
    return tuple(_cut(leaves, piece, 0) for piece in self.pieces(p))

  def take_stacked(self, deltas: StackedParams, p: int) -> PieceValues:
    """As `take`, for leaves (and values) with a leading learner axis."""
    leaves = named_leaves(deltas)
    return tuple(_cut(leaves, piece, 1) for piece in self.pieces(p))

  def put(self, params: Params, p: int, values: Sequence[AnyLeaf]) -> Params:
    """Parameters with the values of fragment `p` replaced, in every tied place.

    Values are cast to the dtype of their leaf. Jitted with `params` donated,
    this writes in place.

    Raises:
      ValueError: values that do not have the shapes of the fragment's pieces.
    """
    leaves = named_leaves(params)
    for piece, value in self._match(p, values):
      for path in piece.paths:
        leaves[path] = _write(_leaf(leaves, path, piece, 0), piece, value)
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())

  def assemble(
    self, values: Sequence[Sequence[AnyLeaf]], like: ShapeTree
  ) -> Params:
    """Parameters made of the values of all fragments, in order.

    Args:
      values: for every fragment the values in piece order.
      like: pytree that gives the structure and the dtypes.

    Raises:
      ValueError: values that do not have the shapes of the plan's pieces.
    """
    if len(values) != self.num_fragments:
      raise ValueError(
        f'assemble needs the values of all {self.num_fragments} fragments, '
        f'got {len(values)}.'
      )
    parts: dict[str, list[tuple[Piece, Any]]] = collections.defaultdict(list)
    for p, values_of_fragment in enumerate(values):
      for piece, value in self._match(p, values_of_fragment):
        for path in piece.paths:
          parts[path].append((piece, value))
    leaves = named_leaves(like)
    for path, leaf in leaves.items():
      if path not in parts:
        raise ValueError(f'The plan has no leaf {path!r}; make it anew.')
      leaves[path] = _join(parts[path]).astype(leaf.dtype)
    return jax.tree.unflatten(jax.tree.structure(like), leaves.values())

  def _match(
    self, p: int, values: Sequence[AnyLeaf]
  ) -> Iterable[tuple[Piece, AnyLeaf]]:
    expected = tuple(piece.shape for piece in self.pieces(p))
    got = tuple(tuple(value.shape) for value in values)
    if expected != got:
      raise ValueError(
        f'Fragment {p} must have pieces of shapes {expected}, got {got}; '
        'take them from a plan with the same digest.'
      )
    return zip(self.pieces(p), values, strict=True)


def _leaf(leaves: dict[str, Any], path: str, piece: Piece, lead: int) -> Any:
  """Looks a leaf up, which has `lead` further axes in front."""
  if path not in leaves:
    raise ValueError(
      f'params must have the leaves of the plan, but {path!r} is missing; '
      'make the plan from these params.'
    )
  shape = tuple(leaves[path].shape)
  if len(shape) < lead or shape[lead:] != piece.leaf_shape:
    axis = 'a leading learner axis and ' if lead else ''
    raise ValueError(
      f'Leaf {path!r} must have {axis}shape {piece.leaf_shape}, got {shape}; '
      'make the plan from these params.'
    )
  return leaves[path]


def _cut(leaves: dict[str, Any], piece: Piece, lead: int) -> AnyLeaf:
  value = _leaf(leaves, piece.paths[0], piece, lead)
  if piece.layer is not None:
    value = value[(slice(None),) * lead + (piece.layer,)]
  if piece.rows is not None:
    value = value[(slice(None),) * lead + (slice(*piece.rows),)]
  return value


def _write(leaf: AnyLeaf, piece: Piece, value: AnyLeaf) -> AnyLeaf:
  value = jnp.asarray(value).astype(leaf.dtype)
  if piece.layer is None and piece.rows is None:
    return value
  starts = np.zeros(leaf.ndim, np.int32)
  if piece.layer is not None:
    value = value[None]
    starts[0] = piece.layer
  if piece.rows is not None:
    starts[0 if piece.layer is None else 1] = piece.rows[0]
  # Not a scatter: XLA does this in place, also where the leaf is sharded.
  return jax.lax.dynamic_update_slice(jnp.asarray(leaf), value, tuple(starts))


def _join(parts: list[tuple[Piece, Any]]) -> AnyLeaf:
  """Puts the pieces of one leaf together."""
  layers: dict[int | None, list[tuple[int, Any]]] = collections.defaultdict(
    list
  )
  for piece, value in parts:
    first_row = 0 if piece.rows is None else piece.rows[0]
    layers[piece.layer].append((first_row, value))
  joined = {}
  for layer, blocks in layers.items():
    values = [value for _, value in sorted(blocks, key=lambda block: block[0])]
    joined[layer] = values[0] if len(values) == 1 else jnp.concatenate(values)
  if None in joined:
    return jnp.asarray(joined[None])
  return jnp.stack([joined[layer] for layer in range(len(joined))])
