"""Iterators over batches that are addressed by their index.

The position is the index of the next batch; nothing else is needed to continue
exactly, so a state is small and can be kept in any snapshot.
"""

from typing import Any, Protocol

import numpy as np
from jaxtyping import Int, Shaped

Batch = dict[str, Shaped[np.ndarray, '...']]


class IndexedBatches(Protocol):
  """Batches at random access: what an `IndexedIterator` iterates over."""

  def batch(self, index: int) -> Batch:
    """Returns batch `index` of the endless run over all epochs."""
    ...

  def identity(self) -> dict[str, Any]:
    """Whatever an index depends on, by name: JSON-able values."""
    ...


def stack_batches(
  batches: IndexedBatches, position: int, num_steps: int
) -> Batch:
  """Returns batches `position` to `position + num_steps - 1`, stacked.

  Returns:
    Arrays [num_steps, batch, ...]: what one `lax.scan` of `num_steps` inner
    steps consumes.

  Raises:
    ValueError: if `position` is negative or `num_steps` is not positive.
  """
  if num_steps < 1:
    raise ValueError(
      f'num_steps must be at least 1, got {num_steps}; ask for one batch.'
    )
  found = [batches.batch(position + step) for step in range(num_steps)]
  return {name: np.stack([batch[name] for batch in found]) for name in found[0]}


def spread_batches(
  available: int, num_batches: int, batch_size: int
) -> Int[np.ndarray, 'batch example']:
  """Indices of batches that lie evenly over what is there, each of them too.

  Args:
    available: how many examples there are, at least those of all batches.
    num_batches: how many batches.
    batch_size: examples in each; none occurs twice.
  """
  needed = num_batches * batch_size
  spread = np.arange(needed) * available // needed
  # Column by column, so that every batch reaches over all examples.
  return spread.reshape(batch_size, num_batches).T


class IndexedIterator:
  """Iterates over a pipeline, endlessly, from a position that can be saved.

  Attributes:
    pipeline: where batches come from.
    position: index of the next batch.
  """

  def __init__(self, pipeline: IndexedBatches, scan_steps: int | None = None):
    """Starts at batch 0.

    Args:
      pipeline: where batches come from.
      scan_steps: if given, each item is that many batches, stacked; otherwise
        one batch. Not part of the state: it may differ after a restore.

    Raises:
      ValueError: if `scan_steps` is not positive.
    """
    if scan_steps is not None and scan_steps < 1:
      raise ValueError(
        f'scan_steps must be at least 1, got {scan_steps}; None gives single '
        'batches.'
      )
    self.pipeline = pipeline
    self.position = 0
    self._scan_steps = scan_steps

  def __iter__(self) -> 'IndexedIterator':
    return self

  def __next__(self) -> Batch:
    """Returns the next batch, or the batches of the next scan."""
    position = self.position
    if self._scan_steps is None:
      batches = self.pipeline.batch(position)
    else:
      batches = stack_batches(self.pipeline, position, self._scan_steps)
    self.position = position + (self._scan_steps or 1)
    return batches

  def get_state(self) -> dict[str, Any]:
    """Returns the position, and what it is a position in, as a JSON-able dict.

    A new dict, which later steps do not change.
    """
    return {'position': self.position, **self.pipeline.identity()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from a state of an iterator over the same shard and data.

    Raises:
      ValueError: if the state is of other data, or another shard or cut, where
        its position would mean other batches. Nothing is changed then.
    """
    expected = self.pipeline.identity()
    if state.keys() != {'position', *expected}:
      raise ValueError(
        'a data position must hold the fields '
        f'{sorted({"position", *expected})}, got {sorted(state)}; pass what '
        'get_state returned.'
      )
    differences = [
      f'{name} was {state[name]!r} and is {value!r}'
      for name, value in expected.items()
      if state[name] != value
    ]
    if differences:
      raise ValueError(
        'a data position can only be restored to the data, shard and cut it '
        f'was saved from: {"; ".join(differences)}. Restore these values, or '
        'start the data anew at position 0.'
      )
    position = state['position']
    if not isinstance(position, int) or position < 0:
      raise ValueError(
        f'position must be an integer from 0 on, got {position!r}; pass what '
        'get_state returned.'
      )
    self.position = position
