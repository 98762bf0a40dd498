"""The training states of all learners, as one stacked pytree.

Every leaf is [learner, ...] and lies on the device once; scans and adoptions
change rows of it in place. A learner's number is an argument of the compiled
functions, so that they serve all learners.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.array_types import Params, PieceValues
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.training import learner_fragments, mesh
from decoupled_diloco.training.inner import NEVER
from decoupled_diloco.training.learner_fragments import HandOver
from decoupled_diloco.training.step import TrainScan, TrainState
from decoupled_diloco.training.wire_format import WireFormat


class Scan(NamedTuple):
  """A scan to be computed.

  Attributes:
    learner: whose.
    batches: [K, batch, ...].
    global_step: the run's step before it.
  """

  learner: int
  batches: Any
  global_step: int


class LearnerStack:
  """The arrays of all learners.

  Args:
    plan: the fragments.
    trainer: what one scan computes.
    wire: the codecs.
    adopt: how newer versions are adopted.
    num_learners: M.
    is_vmapped: whether scans are computed together in one program.
  """

  def __init__(
    self,
    plan: FragmentPlan,
    trainer: TrainScan,
    *,
    wire: WireFormat,
    adopt: AdoptOptions,
    num_learners: int,
    is_vmapped: bool,
  ):
    self._plan = plan
    self._trainer = trainer
    self._wire = wire
    self._adopt_options = adopt
    self._num_learners = num_learners
    self._is_vmapped = is_vmapped
    self._like = jax.eval_shape(trainer.task.init, jax.random.key(0))
    shapes = jax.eval_shape(trainer.init_state, jax.random.key(0))
    self._state: TrainState = jax.tree.map(
      lambda leaf: jnp.zeros((num_learners, *leaf.shape), leaf.dtype), shapes
    )
    self._scans: dict[Any, jax.stages.Compiled] = {}
    self._row = jax.jit(_row)
    self._set_row = jax.jit(_set_row, donate_argnums=0)
    self._take_rows = jax.jit(_row)
    self._put_rows = jax.jit(_put_rows, donate_argnums=0)
    self._vmapped = jax.jit(self._scan_vmapped, donate_argnums=0)
    self._encode = jax.jit(self._encode_row, static_argnums=2)
    self._adopt = jax.jit(self._adopt_row, static_argnums=2, donate_argnums=0)
    self._assemble = jax.jit(lambda values: plan.assemble(values, self._like))

  @property
  def keeps_progress(self) -> bool:
    """Whether adoption leaves in place what no merge has seen."""
    return self._adopt_options.rule == 'rebase'

  @property
  def num_scan_programs(self) -> int:
    """How many programs were compiled for scans of several learners."""
    return len(self._scans)

  # States.

  def begin(
    self,
    learner: int,
    values: Sequence[PieceValues],
    rng: jax.Array,
    rejoin_step: int | None,
  ) -> None:
    """Makes a learner's state.

    Args:
      learner: whose.
      values: of every fragment.
      rng: key of its random stream.
      rejoin_step: the run's global step, if it has begun without it.
    """
    state = self._trainer.init_from(
      self._assemble(tuple(values)),
      rng,
      NEVER if rejoin_step is None else rejoin_step,
    )
    self.restore(learner, state)

  def restore(self, learner: int, state: TrainState) -> None:
    """Puts a state in place of a learner's."""
    self._state = self._set_row(self._state, np.int32(learner), state)

  def values(self, learner: int, fragment: int) -> PieceValues:
    """A learner's copy of a fragment."""
    params = self._row(self._state.params, np.int32(learner))
    return self._plan.take(params, fragment)

  def snapshot(self, learner: int) -> TrainState:
    """A copy of a learner's state."""
    return self._row(self._state, np.int32(learner))

  # Scans.

  def scan(self, scans: Sequence[Scan]) -> dict[int, jax.Array]:
    """Trains; returns the mean losses by learner, still being computed."""
    losses: dict[int, jax.Array] = {}
    for group in self._groups(scans):
      if len(group) == 1:
        losses[group[0].learner] = self._scan_one(group[0])
        continue
      rows = np.array([scan.learner for scan in group], np.int32)
      found = self._scan_rows(group, rows)
      losses.update((scan.learner, found[i]) for i, scan in enumerate(group))
    return losses

  # Rows are cut out and put back by programs of their own. In one with the
  # scan, XLA fuses them with its arithmetic, which is then done several times.

  def _scan_one(self, scan: Scan) -> jax.Array:
    row = np.int32(scan.learner)
    state, metrics = self._trainer.scan(
      self._row(self._state, row), scan.batches, scan.global_step
    )
    self._state = self._set_row(self._state, row, state)
    return metrics['loss']

  def _scan_rows(self, group: Sequence[Scan], rows: np.ndarray) -> jax.Array:
    batches = jax.tree.map(
      lambda *leaves: np.stack(leaves), *(scan.batches for scan in group)
    )
    steps = np.array([scan.global_step for scan in group], np.int32)
    is_whole = len(rows) == self._num_learners
    state = self._state if is_whole else self._take_rows(self._state, rows)
    run = self._compiled_scan(state, batches, steps)
    state, losses = run(state, batches, steps)
    if not is_whole:
      state = self._put_rows(self._state, rows, state)
    self._state = state
    return losses

  def _groups(self, scans: Sequence[Scan]) -> Iterator[Sequence[Scan]]:
    """Scans that are computed together, of as few sizes as may be.

    A program is compiled for every size: those of powers of two, and that of
    all learners, which is the one that matters when they keep step.
    """
    by_shapes: dict[Any, list[Scan]] = {}
    for scan in sorted(scans, key=lambda scan: scan.learner):
      by_shapes.setdefault(_shapes_of(scan.batches), []).append(scan)
    for group in by_shapes.values():
      while group:
        size = 1
        if len(group) == self._num_learners and self._is_vmapped:
          size = len(group)
        elif self._is_vmapped:
          size = 1 << (len(group).bit_length() - 1)
        yield group[:size]
        group = group[size:]

  def _compiled_scan(
    self, state: TrainState, batches: Any, steps: np.ndarray
  ) -> Any:
    key = _shapes_of(batches)
    if key not in self._scans:
      # The model's constraints on activations need the mesh and the rules.
      with (
        jax.set_mesh(self._trainer.mesh),
        nnx.logical_axis_rules(mesh.DEFAULT_RULES),  # pyright: ignore
      ):
        self._scans[key] = self._vmapped.lower(state, batches, steps).compile()
    return self._scans[key]

  def _scan_vmapped(
    self, state: TrainState, batches: Any, steps: jax.Array
  ) -> tuple[TrainState, jax.Array]:
    # The jitted function itself: `scan` calls what was compiled from it.
    state, metrics = jax.vmap(self._trainer.jitted_scan)(state, batches, steps)
    return state, metrics['loss']

  # Fragments.

  def encode(
    self, learner: int, fragment: int, base: PieceValues, residual: Any
  ) -> tuple[HandOver, jax.Array]:
    """A fragment's delta as it is now, and its norm as the syncer sees it."""
    return self._encode(
      self._state.params, np.int32(learner), fragment, base, residual
    )

  def _encode_row(
    self,
    params: Params,
    learner: jax.Array,
    p: int,
    base: PieceValues,
    residual: Any,
  ) -> tuple[HandOver, jax.Array]:
    handed_over = learner_fragments.encode_fragment(
      self._plan,
      self._wire,
      _row(params, learner),
      p,
      base,
      residual,
      keeps_decoded=True,
    )
    norm = optax.tree.norm(handed_over.decoded)
    if not self.keeps_progress:
      handed_over = handed_over._replace(decoded=None)
    return handed_over, norm

  def adopt(
    self,
    learner: int,
    fragment: int,
    published: PieceValues,
    base: PieceValues,
    decoded: PieceValues | None,
  ) -> None:
    """Adopts a newer version; arguments as in `adopt_fragment`."""
    if self.keeps_progress and decoded is None:
      # One program serves both: the base minus nothing is the base.
      decoded = tuple(jnp.zeros_like(value) for value in base)
    params = self._adopt(
      self._state.params, np.int32(learner), fragment, published, base, decoded
    )
    self._state = self._state._replace(params=params)

  def _adopt_row(
    self,
    params: Params,
    learner: jax.Array,
    p: int,
    published: PieceValues,
    base: PieceValues,
    decoded: PieceValues | None,
  ) -> Params:
    row = _row(params, learner)
    adopted = learner_fragments.adopt_fragment(
      self._plan, self._adopt_options, row, p, published, base, decoded
    )
    # Leaves that the fragment has no part in are left alone.
    return jax.tree.map(
      lambda leaf, old, new: (
        leaf if new is old else _with_row(leaf, learner, new)
      ),
      params,
      row,
      adopted,
    )


def _row(tree: Any, row: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf[row], tree)


def _set_row(tree: Any, row: Any, values: Any) -> Any:
  return jax.tree.map(lambda leaf, new: _with_row(leaf, row, new), tree, values)


def _put_rows(tree: Any, rows: Any, values: Any) -> Any:
  return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new), tree, values)


def _with_row(leaf: jax.Array, row: Any, new: jax.Array) -> jax.Array:
  # Not a scatter, which XLA unrolls into a loop on a CPU.
  return lax.dynamic_update_index_in_dim(leaf, new, row, 0)


def _shapes_of(batches: Any) -> Any:
  leaves, structure = jax.tree.flatten(batches)
  return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
