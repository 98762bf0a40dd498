"""A learner's arrays: its training state, and what it knows of the global one.

Threads share them as follows. The training thread alone touches the training
state; at scan boundaries it captures fragments and adopts new versions. Other
threads fetch what was captured (`fetch`) and decode what came in (`stage`).
Arrays are immutable, so passing references needs no copies; but whatever
outlives a boundary must have buffers of its own, because the next scan donates
the training state's.

Whatever is kept lies on the mesh like the parameters that it belongs to. Bases
and publications are float32 (`wire_shapes`) also where the parameters are not.
"""

import enum
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.array_types import Params
from decoupled_diloco.ops.codecs import Codec
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.ops.pieces import Piece, named_leaves
from decoupled_diloco.training import learner_fragments
from decoupled_diloco.training.inner import NEVER
from decoupled_diloco.training.step import Metrics, TrainScan, TrainState
from decoupled_diloco.training.wire_format import (
  WireFormat,
  apply_update,
  wire_shapes,
)

Values = tuple[jax.Array, ...]
Shardings = tuple[NamedSharding, ...]
Payload = bytes | bytearray | memoryview


class Staging(enum.Enum):
  """What became of a publication."""

  STAGED = enum.auto()  # It can be adopted.
  OLD = enum.auto()  # What is here is as new.
  GAP = enum.auto()  # It updates a version that is not here.


class Captured(NamedTuple):
  """A fragment's delta at a scan boundary, encoded, still on the device."""

  fragment: int
  round: int
  encoded: Any


class _Flight(NamedTuple):
  """What is kept of a hand-over until its fate is known.

  Attributes:
    decoded: the delta as the syncer sees it; None where nobody needs it.
    residual: the error feedback's state, if it is merged.
  """

  round: int
  decoded: Values | None
  residual: Any


class LocalModel:
  """The arrays of one learner.

  Args:
    plan: the fragments.
    trainer: the compiled training functions.
    wire: the codecs.
    options: how newer versions are adopted.
  """

  def __init__(
    self,
    plan: FragmentPlan,
    trainer: TrainScan,
    *,
    wire: WireFormat,
    options: AdoptOptions,
  ):
    self.plan = plan
    self.trainer = trainer
    self._wire = wire
    self._options = options
    P = plan.num_fragments
    leaves = named_leaves(trainer.state_shardings.params)
    self._shapes = [wire_shapes(plan, p) for p in range(P)]
    self._shardings: list[Shardings] = [
      tuple(_cut(leaves[piece.paths[0]], piece) for piece in plan.pieces(p))
      for p in range(P)
    ]
    self._state: TrainState | None = None
    self._lock = threading.Lock()
    self._bases: list[Values | None] = [None] * P
    self._base_versions = [-1] * P
    self._staged: list[dict[int, Values]] = [{} for _ in range(P)]
    self._claimed: list[dict[int, Values]] = [{} for _ in range(P)]
    self._flights: list[_Flight | None] = [None] * P
    self._residuals: list[Any] = [()] * P
    self._assemble = jax.jit(
      self._assemble_params, out_shardings=trainer.state_shardings.params
    )
    self._adopt = jax.jit(
      self._adopt_fragment,
      static_argnums=1,
      donate_argnums=0,
      # Exactly what the compiled scan takes.
      out_shardings=trainer.state_shardings.params,
    )
    self._encode = jax.jit(self._encode_fragment, static_argnums=1)
    self._decode_update = jax.jit(self._next_version, static_argnums=0)
    self._decode_value = jax.jit(wire.value.decode)
    self._copy = jax.jit(
      lambda state: jax.tree.map(jnp.copy, state),
      out_shardings=trainer.state_shardings,
    )

  # The jitted functions. Shardings are static, so that fragments of the same
  # shapes share what is compiled.

  def _assemble_params(self, values: Sequence[Values]) -> Params:
    shapes = jax.eval_shape(self.trainer.task.init, jax.random.key(0))
    return self.plan.assemble(values, shapes)

  def _adopt_fragment(
    self,
    params: Params,
    p: int,
    published: Values,
    base: Values,
    decoded: Values | None,
  ) -> Params:
    return learner_fragments.adopt_fragment(
      self.plan, self._options, params, p, published, base, decoded
    )

  def _encode_fragment(
    self, params: Params, p: int, base: Values, residual: Any
  ) -> tuple[Any, Values | None, Any]:
    encoded, decoded, residual = learner_fragments.encode_fragment(
      self.plan,
      self._wire,
      params,
      p,
      base,
      residual,
      keeps_decoded=self.keeps_progress,
    )
    if decoded is not None:
      decoded = lax.with_sharding_constraint(decoded, self._shardings[p])
    if self._wire.up.error_feedback:
      residual = lax.with_sharding_constraint(residual, self._shardings[p])
    return encoded, decoded, residual

  def _next_version(
    self, shardings: Shardings, before: Values, encoded: Any
  ) -> Values:
    values = apply_update(self._wire, before, encoded)
    return lax.with_sharding_constraint(values, shardings)

  # The training thread.

  @property
  def keeps_progress(self) -> bool:
    """Whether adoption leaves in place what no merge has seen."""
    return self._options.rule == 'rebase'

  @property
  def params(self) -> Params:
    """The learner's parameters; valid until the next scan or adoption."""
    assert self._state is not None
    return self._state.params

  def begin(
    self, versions: Sequence[int], rng: jax.Array, rejoin_step: int = NEVER
  ) -> None:
    """Makes the training state from claimed versions of all fragments.

    Args:
      versions: per fragment, which claimed version to start from.
      rng: key of the learner's random stream.
      rejoin_step: the run's global step, if it has begun without this learner.
    """
    with self._lock:
      for p, version in enumerate(versions):
        self._bases[p] = self._claimed[p][version]
        self._base_versions[p] = version
        self._claimed[p] = {
          newer: values
          for newer, values in self._claimed[p].items()
          if newer > version
        }
    bases = [self.base(p) for p in range(self.plan.num_fragments)]
    self._state = self.trainer.init_from(
      self._assemble(bases), rng, rejoin_step
    )
    if self._wire.up.error_feedback:
      self._residuals = [
        jax.device_put(self._wire.up.init(base), shardings)
        for base, shardings in zip(bases, self._shardings, strict=True)
      ]

  def snapshot(self) -> dict[str, jax.Array]:
    """What a new process needs to go on from here, by name.

    The training state is copied where it lies, because the next scan donates
    it; so this only queues work, and takes as much memory as that state.
    """
    assert self._state is not None
    held = self._copy(self._state), list(self._bases), list(self._residuals)
    return _named(held)

  def snapshot_like(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of what `snapshot` gives."""
    return _named(self._abstract())

  def _abstract(self) -> tuple[TrainState, list[Any], list[Any]]:
    bases = [
      _placed(shapes, shardings)
      for shapes, shardings in zip(self._shapes, self._shardings, strict=True)
    ]
    residuals: list[Any] = [()] * len(bases)
    if self._wire.up.error_feedback:
      residuals = [
        _placed(jax.eval_shape(self._wire.up.init, base), shardings)
        for base, shardings in zip(bases, self._shardings, strict=True)
      ]
    return self.trainer.abstract_state, bases, residuals

  def resume(
    self, arrays: Mapping[str, jax.Array], versions: Sequence[int]
  ) -> None:
    """Goes on from a snapshot, instead of `begin`.

    Args:
      arrays: like `snapshot_like`.
      versions: per fragment, the version that its base is.
    """
    structure = jax.tree.structure(self._abstract())
    self._state, bases, residuals = structure.unflatten(
      arrays[name] for name in sorted(arrays)
    )
    with self._lock:
      self._bases, self._base_versions = list(bases), list(versions)
      self._residuals = list(residuals)

  def take_optimizer(self, arrays: Mapping[str, jax.Array]) -> None:
    """Takes over the inner optimizer's state from a peer's snapshot."""
    assert self._state is not None
    structure = jax.tree.structure(self._abstract())
    peer, *_ = structure.unflatten(arrays[name] for name in sorted(arrays))
    self._state = self._state._replace(
      opt_state=peer.opt_state, rejoin_step=peer.rejoin_step
    )

  def train(self, batches: Any, global_step: int) -> Metrics:
    """One scan; returns its metrics, which may still be being computed."""
    assert self._state is not None
    self._state, metrics = self.trainer.scan(self._state, batches, global_step)
    return metrics

  def capture(self, fragment: int, round_: int) -> Captured:
    """Encodes a fragment's delta as it is now.

    This only puts the work into the device's queue, ahead of the next scan, and
    returns; `fetch` waits for the result. All work on the mesh is queued by the
    training thread, so that the hosts of a learner queue it in one order.
    """
    encoded, decoded, residual = self._encode(
      self.params, fragment, self.base(fragment), self._residuals[fragment]
    )
    with self._lock:
      self._flights[fragment] = _Flight(round_, decoded, residual)
    return Captured(fragment, round_, encoded)

  def adopt(
    self,
    fragment: int,
    version: int,
    merged_round: int,
    is_anew: bool = False,
  ) -> None:
    """Adopts a claimed version.

    Args:
      fragment: which one.
      version: which of its claimed versions.
      merged_round: round of the learner's own hand-over that was merged since
        it last adopted this fragment; -1 if none was.
      is_anew: whether all progress of the local copy is to be given up.
    """
    assert self._state is not None
    base = self.base(fragment)
    if is_anew:
      # Relative to itself, the local copy has no progress. Copies, because the
      # parameters are donated.
      local = self.plan.take(self._state.params, fragment)
      base = tuple(
        jnp.array(value, shape.dtype)
        for value, shape in zip(local, self._shapes[fragment], strict=True)
      )
      base = jax.device_put(base, self._shardings[fragment])
    decoded = None
    with self._lock:
      published = self._claimed[fragment].pop(version)
      self._bases[fragment] = published
      self._base_versions[fragment] = version
      flight = self._flights[fragment]
      if flight is not None and flight.round == merged_round:
        # Relative to the base of now, not of the hand-over: versions that were
        # adopted in between have moved the local copy as they moved the base.
        decoded = flight.decoded
        self._residuals[fragment] = flight.residual
        self._flights[fragment] = None
    params = self._adopt(self._state.params, fragment, published, base, decoded)
    self._state = self._state._replace(params=params)

  def forget(self, fragment: int, round_: int) -> None:
    """Lets go of what was kept for a hand-over that will not be merged."""
    with self._lock:
      flight = self._flights[fragment]
      if flight is not None and flight.round == round_:
        self._flights[fragment] = None

  # Other threads.

  def fetch(self, captured: Captured) -> bytes:
    """The payload of a hand-over."""
    return payloads.to_bytes(captured.encoded)

  def stage(
    self, fragment: int, version: int, form: str, payload: Payload
  ) -> Staging:
    """Decodes a publication, to be adopted at a scan boundary.

    Args:
      fragment: which one.
      version: the version that it makes.
      form: 'update' or 'value'.
      payload: its bytes.

    Raises:
      ValueError: if the payload has not the length of this fragment's.
    """
    shapes = self._shapes[fragment]
    shardings = self._shardings[fragment]
    with self._lock:
      held = self._claimed[fragment] | self._staged[fragment]
      newest = max([self._base_versions[fragment], *held])
      before = held.get(newest, self._bases[fragment])
    if version <= newest:
      return Staging.OLD
    if form == 'value':
      encoded = payloads.from_bytes(self._wire.value, shapes, payload)
      values = jax.device_put(self._decode_value(encoded), shardings)
    elif version == newest + 1 and before is not None:
      encoded = payloads.from_bytes(self._wire.down, shapes, payload)
      values = self._decode_update(shardings, before, encoded)
    else:
      return Staging.GAP
    with self._lock:
      self._staged[fragment][version] = values
    return Staging.STAGED

  def claim(self, fragment: int, version: int) -> None:
    """Keeps a staged version until `adopt` or `begin`, and no older one."""
    with self._lock:
      self._claimed[fragment][version] = self._staged[fragment].pop(version)
    self.drop_older(fragment, version)

  def drop_older(self, fragment: int, version: int) -> None:
    """Lets go of staged versions that nobody will claim, for a newer is known.

    So a learner that adopts seldom, or is still compiling, holds a version or
    two of a fragment, however many were published.
    """
    with self._lock:
      self._staged[fragment] = {
        staged: values
        for staged, values in self._staged[fragment].items()
        if staged >= version
      }

  def base(self, fragment: int) -> Values:
    """The version of a fragment that was adopted last."""
    base = self._bases[fragment]
    assert base is not None
    return base

  def compile(self, batches: Any) -> None:
    """Compiles all that a learner runs, so that no boundary waits for it.

    Args:
      batches: arrays or shapes of one scan's batches.
    """
    self.trainer.compile(batches)
    shapes = jax.eval_shape(self.trainer.task.init, jax.random.key(0))
    params = _placed(shapes, self.trainer.state_shardings.params)
    state, bases, residuals = self._abstract()
    self._copy.lower(state).compile()
    for p, (base, residual) in enumerate(zip(bases, residuals, strict=True)):
      self._encode.lower(params, p, base, residual).compile()
      for decoded in [None, base] if self.keeps_progress else [None]:
        self._adopt.lower(params, p, base, base, decoded).compile()
      self._decode_value.lower(self._zeros(self._wire.value, p)).compile()
      if self._wire.form == 'update':
        self._decode_update.lower(
          self._shardings[p], base, self._zeros(self._wire.down, p)
        ).compile()
    self._assemble.lower(bases).compile()

  def _zeros(self, codec: Codec, fragment: int) -> Any:
    shapes = self._shapes[fragment]
    nbytes = payloads.encoded_nbytes(codec, shapes)
    return payloads.from_bytes(codec, shapes, bytes(nbytes))


def _named(tree: Any) -> dict[str, Any]:
  """The leaves of a tree; the order of the names is that of the leaves."""
  return {f'array_{i:05}': x for i, x in enumerate(jax.tree.leaves(tree))}


def _placed(shapes: Any, shardings: Any) -> Any:
  """Shapes that lie somewhere, to compile for."""
  return jax.tree.map(
    lambda shape, sharding: jax.ShapeDtypeStruct(
      shape.shape, shape.dtype, sharding=sharding
    ),
    shapes,
    shardings,
  )


def _cut(sharding: NamedSharding, piece: Piece) -> NamedSharding:
  """How a piece of a leaf lies, if the leaf lies so: where it lies already."""
  ndim = len(piece.leaf_shape)
  axes = [*sharding.spec, *(None,) * (ndim - len(sharding.spec))]
  if piece.layer is not None:
    del axes[0]
  spec = PartitionSpec(*axes)
  if piece.rows is not None:
    # A block of rows that the devices cannot share evenly lies on all of them.
    try:
      NamedSharding(sharding.mesh, spec).shard_shape(piece.shape)
    except ValueError:
      spec = PartitionSpec(None, *axes[1:])
  return NamedSharding(sharding.mesh, spec)
