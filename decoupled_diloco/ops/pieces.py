"""Pieces: what parameters are made of, for the purpose of synchronising them.

A *piece* is a whole leaf, one layer's slice of a leaf that is stacked along
axis 0 (as a scanned model holds its layers), or a block of rows of an
embedding. Pieces carry canonical names, those of the unrolled model, so that
the scanned and the unrolled form of one model consist of the same pieces.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decoupled_diloco.ops.array_types import ShapeTree

_VARIABLE_VALUE = jax.tree_util.GetAttrKey('value')

PathRule = str | Callable[[str], bool] | None
"""A regular expression to search for in a dotted path, a predicate, or none."""


@dataclasses.dataclass(frozen=True)
class Piece:
  """One unit of parameters that is merged as one tensor.

  Attributes:
    name: canonical name, e.g. `layers.3.attention.query`, and with a row block
      `embed.table[0:512]`.
    aliases: canonical names of the further places of a tied piece.
    paths: dotted paths of the leaves that hold it, one per place.
    leaf_shape: shape of those leaves.
    layer: index along axis 0 of the leaves, or None where they are not stacked.
    rows: first row and row after the last one, or None for all rows. Rows lie
      along the first axis of the (layer's slice of the) leaf.
    shape: shape of the piece itself.
    dtype: name of its dtype, e.g. 'bfloat16'.
    is_embedding: embeddings are merged by the weighted mean, whatever the rule
      for the other pieces.
  """

  name: str
  aliases: tuple[str, ...]
  paths: tuple[str, ...]
  leaf_shape: tuple[int, ...]
  layer: int | None
  rows: tuple[int, int] | None
  shape: tuple[int, ...]
  dtype: str
  is_embedding: bool

  @property
  def size(self) -> int:
    """Number of elements; a tied piece counts once."""
    return math.prod(self.shape)

  @property
  def num_rows(self) -> int:
    """Into how many row blocks the piece can be cut."""
    return self.shape[0] if self.size and self.shape else 1

  def with_rows(self, start: int, stop: int) -> 'Piece':
    """The block of rows `start:stop` of this (uncut) piece."""
    if (start, stop) == (0, self.num_rows):
      return self
    return dataclasses.replace(
      self,
      name=f'{self.name}[{start}:{stop}]',
      rows=(start, stop),
      shape=(stop - start, *self.shape[1:]),
    )


def named_leaves(tree: Any) -> dict[str, Any]:
  """Leaves of a pytree by dotted path, in the tree's own order.

  >>> named_leaves({'layers': [{'w': 1}], 'out': 2})
  {'layers.0.w': 1, 'out': 2}

  Raises:
    ValueError: two leaves have the same dotted path.
  """
  found: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    # The content of an nnx Variable is called as the Variable itself, so that
    # a state and its pure dict have the same names.
    if path and path[-1] == _VARIABLE_VALUE:
      path = path[:-1]
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    if name in found:
      raise ValueError(
        f'Dotted paths must be unique, but two leaves are called {name!r}; '
        'rename one, for example by taking the dot out of its key.'
      )
    found[name] = leaf
  return found


def natural_key(name: str) -> tuple[Any, ...]:
  """Sorts names so that layer 10 follows layer 9.

  >>> sorted(['layers.10.w', 'layers.9.w', 'embed'], key=natural_key)
  ['embed', 'layers.9.w', 'layers.10.w']
  """
  parts = []
  for part in name.split('.'):
    runs = re.findall(r'\d+|\D+', part)
    parts.append(
      tuple((0, int(r), '') if r.isdecimal() else (1, 0, r) for r in runs)
    )
  return (*parts, name)


def layer_of(name: str) -> tuple[str, int] | None:
  """The layer a canonical name belongs to: what is counted, and its index.

  The first integer in the path counts, or the first `_3` at a container's end.

  >>> layer_of('decoder.layers.3.mlp.0.kernel')
  ('decoder.layers', 3)
  >>> layer_of('encoderblock_11.mlp.kernel')
  ('encoderblock', 11)
  >>> layer_of('final_norm.scale') is None
  True
  """
  found = re.search(r'(?:^|\.)(?:(\d+)(?=\.|$)|[^.]*_(\d+)(?=\.))', name)
  if found is None:
    return None
  group = 1 if found.group(1) is not None else 2
  counted = name[: found.start(group)].rstrip('._')
  return counted, int(found.group(group))


def find_pieces(
  params: ShapeTree,
  *,
  stacked: PathRule,
  embedding: PathRule,
  tied: Iterable[Iterable[str]],
) -> tuple[Piece, ...]:
  """Lists the pieces of `params`, none of them cut into rows, in name order.

  Args:
    params: arrays or `jax.ShapeDtypeStruct`s.
    stacked: which containers hold leaves that are stacked along axis 0.
    embedding: which canonical names are embeddings.
    tied: groups of leaf paths that hold one and the same parameter; leaves that
      are the same array object are found without being named.

  Raises:
    ValueError: a leaf has no shape and dtype, stacked leaves disagree about the
      number of layers, or tied paths are unknown or differ in shape or dtype.
  """
  leaves = named_leaves(params)
  for path, leaf in leaves.items():
    if not (hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')):
      raise ValueError(
        'Every leaf must be an array or a jax.ShapeDtypeStruct, but '
        f'{path!r} is a {type(leaf).__name__}; convert it with jnp.asarray.'
      )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
      raise ValueError(
        f'Only numbers can be merged, but leaf {path!r} has dtype '
        f'{leaf.dtype}; keep random keys out of the parameters.'
      )
  containers = _stacked_containers(leaves, as_predicate(stacked))
  is_embedding = as_predicate(embedding)
  pieces = []
  for paths in _tied_groups(leaves, tied):
    leaf = leaves[paths[0]]
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype).name
    depth = shape[0] if containers.get(paths[0]) is not None else None
    for layer in [None] if depth is None else range(depth):
      names = [_canonical(path, containers.get(path), layer) for path in paths]
      pieces.append(
        Piece(
          name=names[0],
          aliases=tuple(names[1:]),
          paths=paths,
          leaf_shape=shape,
          layer=layer,
          rows=None,
          shape=shape if layer is None else shape[1:],
          dtype=dtype,
          is_embedding=any(is_embedding(name) for name in names),
        )
      )
  return tuple(sorted(pieces, key=lambda piece: natural_key(piece.name)))


def as_predicate(rule: PathRule) -> Callable[[str], bool]:
  """Makes a predicate of a regular expression, a predicate or None."""
  if rule is None:
    return lambda path: False
  if isinstance(rule, str):
    pattern = re.compile(rule)
    return lambda path: pattern.search(path) is not None
  return rule


def _canonical(path: str, container: str | None, layer: int | None) -> str:
  if layer is None:
    return path
  if container is None:  # A tied place outside any stack.
    return f'{path}[{layer}]'
  return f'{container}.{layer}{path[len(container) :]}'


def _stacked_containers(
  leaves: dict[str, Any], is_stacked: Callable[[str], bool]
) -> dict[str, str]:
  """Maps the paths of stacked leaves to the container that is stacked."""
  containers: dict[str, str] = {}
  depths: dict[str, dict[int, str]] = collections.defaultdict(dict)
  for path, leaf in leaves.items():
    parts = path.split('.')
    for end in range(1, len(parts)):
      container = '.'.join(parts[:end])
      if not is_stacked(container):
        continue
      # An index right after the container means that it is unrolled already.
      if not parts[end].isdecimal() and leaf.shape and leaf.shape[0]:
        containers[path] = container
        depths[container].setdefault(leaf.shape[0], path)
      break
  for container, found in depths.items():
    if len(found) > 1:
      (depth, path), (other_depth, other_path) = list(found.items())[:2]
      raise ValueError(
        f'Leaves stacked under {container!r} must have one number of layers '
        f'along axis 0, but {path!r} has {depth} and {other_path!r} has '
        f'{other_depth}; if they are not stacked, pass stacked=None or a '
        'pattern that leaves them out.'
      )
  return containers


def _tied_groups(
  leaves: dict[str, Any], tied: Iterable[Iterable[str]]
) -> list[tuple[str, ...]]:
  """Groups the paths that share one parameter, each group in name order."""
  group_of = {path: {path} for path in leaves}

  def join(first: str, second: str) -> None:
    one, two = leaves[first], leaves[second]
    if (one.shape, one.dtype) != (two.shape, two.dtype):
      raise ValueError(
        f'Tied leaves must have one shape and dtype, but {first!r} is '
        f'{one.dtype}{list(one.shape)} and {second!r} is '
        f'{two.dtype}{list(two.shape)}; untie them.'
      )
    union = group_of[first] | group_of[second]
    for path in union:
      group_of[path] = union

  for group in tied:
    first, *others = group
    for path in (first, *others):
      if path not in leaves:
        raise ValueError(
          f'tied must name leaves of params, but there is no {path!r}; '
          f'the leaves are {sorted(leaves, key=natural_key)}.'
        )
      join(first, path)
  # Shape structs may be one shared object for many leaves, so only the identity
  # of real arrays says that two places hold the same parameter.
  holder: dict[int, str] = {}
  for path, leaf in leaves.items():
    if isinstance(leaf, (jax.Array, np.ndarray)):
      join(holder.setdefault(id(leaf), path), path)
  ordered = {
    tuple(sorted(group, key=natural_key)) for group in group_of.values()
  }
  return sorted(ordered)
