"""Patterns: how pieces are distributed over fragments.

Every fragment is sent at once, so the largest one sets the peak bandwidth: the
default pattern makes it small. Source: the `balanced` tensor fragments of
Decoupled DiLoCo (arXiv 2604.21428); `strided` and sequential layers are those
of Streaming DiLoCo (arXiv 2501.18512, section 2.2).
"""

import collections
import heapq
from collections.abc import Callable, Sequence

import numpy as np

from decoupled_diloco.ops.pieces import Piece, layer_of, natural_key

Bins = list[list[Piece]]


def distribute(
  pieces: Sequence[Piece], num_fragments: int, pattern: str
) -> tuple[tuple[Piece, ...], ...]:
  """Distributes pieces, in name order, over fragments that are not empty.

  Embeddings get fragments of their own, the last ones, since they are merged by
  another rule; only with a single fragment do they share it.

  Raises:
    ValueError: unknown pattern, or too many fragments for these pieces.
  """
  if pattern not in PATTERNS:
    raise ValueError(
      f'pattern={pattern!r} must be one of {", ".join(sorted(PATTERNS))}.'
    )
  if num_fragments < 1:
    raise ValueError(
      f'num_fragments={num_fragments} must be at least 1; '
      '1 synchronises everything at once, as DiLoCo does.'
    )
  if not pieces:
    raise ValueError('params must have at least one leaf, but they have none.')
  embeddings = [piece for piece in pieces if piece.is_embedding]
  others = [piece for piece in pieces if not piece.is_embedding]
  if num_fragments == 1:
    bins = [list(pieces)]
  elif not embeddings:
    bins = PATTERNS[pattern](others, num_fragments)
  elif pattern == 'balanced':
    bins = _balance_with_embeddings(others, embeddings, num_fragments)
  else:
    bins = [*PATTERNS[pattern](others, num_fragments - 1), embeddings]
  empty = [p for p, pieces_of_bin in enumerate(bins) if not pieces_of_bin]
  if empty:
    other_way = '' if pattern == 'balanced' else " or pattern='balanced'"
    raise ValueError(
      f'num_fragments={num_fragments} must leave no fragment empty, but '
      f'pattern={pattern!r} finds no piece for {len(empty)} of them among '
      f'{len(pieces)} pieces; use num_fragments='
      f'{num_fragments - len(empty)}{other_way}.'
    )
  return tuple(
    tuple(sorted(fragment, key=lambda piece: natural_key(piece.name)))
    for fragment in bins
  )


def _total(pieces: Sequence[Piece]) -> int:
  return sum(piece.size for piece in pieces)


def _fill(bins: Bins, pieces: Sequence[Piece]) -> Bins:
  """Adds pieces by size, the largest first, each to the least loaded bin.

  This is the LPT rule (R. L. Graham, "Bounds on multiprocessing timing
  anomalies", 1969): the peak is at most 4/3 of the smallest possible one.
  """
  if not bins:
    return bins
  heap = [(_total(bin_), len(bin_), i) for i, bin_ in enumerate(bins)]
  heapq.heapify(heap)
  for piece in sorted(pieces, key=lambda p: (-p.size, natural_key(p.name))):
    load, count, index = heap[0]
    bins[index].append(piece)
    heapq.heapreplace(heap, (load + piece.size, count + 1, index))
  return bins


def _balanced(pieces: Sequence[Piece], num_bins: int) -> Bins:
  return _fill([[] for _ in range(num_bins)], pieces)


def _strided(pieces: Sequence[Piece], num_bins: int) -> Bins:
  bins: Bins = [[] for _ in range(num_bins)]
  without_layer = []
  for piece in pieces:
    layer = layer_of(piece.name)
    if layer is None:
      without_layer.append(piece)
    elif num_bins:
      bins[layer[1] % num_bins].append(piece)
  return _fill(bins, without_layer)


def _layers(pieces: Sequence[Piece], num_bins: int) -> Bins:
  layers: dict[tuple[str, int], list[Piece]] = collections.defaultdict(list)
  without_layer = []
  for piece in pieces:  # In name order, so layers come in order too.
    layer = layer_of(piece.name)
    if layer is None:
      without_layer.append(piece)
    else:
      layers[layer].append(piece)
  bins: Bins = [[] for _ in range(num_bins)]
  groups = list(layers.values())
  bounds = _runs(
    np.array([_total(group) for group in groups]), min(num_bins, len(groups))
  )
  for index, (start, stop) in enumerate(bounds):
    bins[index] = [piece for group in groups[start:stop] for piece in group]
  return _fill(bins, without_layer)


PATTERNS: dict[str, Callable[[Sequence[Piece], int], Bins]] = {
  'balanced': _balanced,
  'strided': _strided,
  'layers': _layers,
}


def _runs(sizes: np.ndarray, num_runs: int) -> list[tuple[int, int]]:
  """Cuts a sequence of units into runs of about equal size, none empty."""
  ends = np.cumsum(sizes, dtype=np.int64)
  bounds = []
  start, done = 0, 0
  for left in range(num_runs, 0, -1):
    target = done + (int(ends[-1]) - done) / left
    # The end nearest to the target; half goes to the longer run.
    stop = min(int(np.searchsorted(ends, target)) + 1, len(ends))
    if stop - 2 >= start and target - ends[stop - 2] < ends[stop - 1] - target:
      stop -= 1
    stop = min(max(stop, start + 1), len(ends) - (left - 1))
    bounds.append((start, stop))
    start, done = stop, int(ends[stop - 1])
  return bounds


def _balance_with_embeddings(
  others: Sequence[Piece], embeddings: Sequence[Piece], num_fragments: int
) -> Bins:
  """Gives the embeddings as many fragments as keep the overall peak smallest.

  They are cut into row blocks only if one fragment of them would be the peak:
  their merge is elementwise, so a cut changes nothing else.
  """
  row_sizes = np.concatenate(
    [
      np.full(piece.num_rows, piece.size // piece.num_rows, np.int64)
      for piece in embeddings
    ]
  )
  most = len(others) + len(row_sizes)
  if num_fragments > most:
    raise ValueError(
      f'num_fragments={num_fragments} must be at most {most}: there are '
      f'{len(others)} pieces and {len(row_sizes)} rows of embeddings, and no '
      f'fragment may be empty; use num_fragments={most} or fewer.'
    )
  # More fragments for the embeddings lower their peak and raise the others':
  # the smallest overall peak lies where the two cross, or just before.
  best: tuple[int, Bins] | None = None
  fewest = max(1, num_fragments - len(others))
  for count in range(fewest, min(len(row_sizes), num_fragments) + 1):
    if others and count == num_fragments:
      break
    rest = _balanced(others, num_fragments - count)
    cut = _cut_rows(embeddings, row_sizes, count)
    rest_peak = max(map(_total, rest), default=0)
    cut_peak = max(map(_total, cut))
    if best is None or max(rest_peak, cut_peak) < best[0]:
      best = max(rest_peak, cut_peak), [*rest, *cut]
    if cut_peak <= rest_peak:
      break
  assert best is not None
  return best[1]


def _cut_rows(
  embeddings: Sequence[Piece], row_sizes: np.ndarray, num_blocks: int
) -> Bins:
  """Cuts the embeddings, laid end to end, into blocks of whole rows."""
  blocks: Bins = []
  for start, stop in _runs(row_sizes, num_blocks):
    block, first_row = [], 0
    for piece in embeddings:
      low = max(start - first_row, 0)
      high = min(stop - first_row, piece.num_rows)
      if low < high:
        block.append(piece.with_rows(low, high))
      first_row += piece.num_rows
    blocks.append(block)
  return blocks
