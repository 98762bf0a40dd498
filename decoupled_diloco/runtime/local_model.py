"""A learner's arrays: its training state, and what it knows of the global one.

Threads share them as follows. The training thread alone touches the training
state; at scan boundaries it captures fragments and adopts new versions. Other
threads fetch what was captured (`fetch`) and decode what came in (`stage`).
Arrays are immutable, so passing references needs no copies; but whatever
outlives a boundary must have buffers of its own, because the next scan donates
the training state's.
"""

import enum
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.array_types import Params, PieceValues
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.runtime.learner_programs import Held, LearnerPrograms
from decoupled_diloco.training.inner import NEVER
from decoupled_diloco.training.step import Metrics, TrainScan, TrainState
from decoupled_diloco.training.wire_format import WireFormat
from decoupled_diloco.transport.base import Payload


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
  decoded: PieceValues | None
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
    self._programs = LearnerPrograms(plan, trainer, wire=wire, options=options)
    P = plan.num_fragments
    self._state: TrainState | None = None
    self._lock = threading.Lock()
    self._bases: list[PieceValues | None] = [None] * P
    self._base_versions = [-1] * P
    self._staged: list[dict[int, PieceValues]] = [{} for _ in range(P)]
    self._claimed: list[dict[int, PieceValues]] = [{} for _ in range(P)]
    self._flights: list[_Flight | None] = [None] * P
    self._residuals: list[Any] = [()] * P

  # The training thread.

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
      self._programs.assemble(bases), rng, rejoin_step
    )
    self._residuals = self._programs.first_residuals(bases)

  def snapshot(self) -> dict[str, jax.Array]:
    """What a new process needs to go on from here, by name.

    The training state is copied where it lies, because the next scan donates
    it; so this only queues work, and takes as much memory as that state.
    """
    assert self._state is not None
    state = self._programs.copy(self._state)
    bases = [self.base(p) for p in range(self.plan.num_fragments)]
    return _named(Held(state, bases, list(self._residuals)))

  def snapshot_like(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of what `snapshot` gives."""
    return _named(self._programs.abstract())

  def _held(self, arrays: Mapping[str, jax.Array]) -> Held:
    """What was named, as it was."""
    structure = jax.tree.structure(self._programs.abstract())
    return structure.unflatten(arrays[name] for name in sorted(arrays))

  def resume(
    self, arrays: Mapping[str, jax.Array], versions: Sequence[int]
  ) -> None:
    """Goes on from a snapshot, instead of `begin`.

    Args:
      arrays: like `snapshot_like`.
      versions: per fragment, the version that its base is.
    """
    self._state, bases, residuals = self._held(arrays)
    with self._lock:
      self._bases = list(bases)
      self._base_versions = list(versions)
      self._residuals = list(residuals)

  def take_optimizer(self, arrays: Mapping[str, jax.Array]) -> None:
    """Takes over the inner optimizer's state from a peer's snapshot."""
    assert self._state is not None
    peer = self._held(arrays).state
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
    encoded, decoded, residual = self._programs.encode(
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
      # Relative to itself, the local copy has no progress.
      base = self._programs.local_copy(self._state.params, fragment)
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
    params = self._programs.adopt(
      self._state.params, fragment, published, base, decoded
    )
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
    shapes = self._programs.shapes[fragment]
    with self._lock:
      held = self._claimed[fragment] | self._staged[fragment]
      newest = max([self._base_versions[fragment], *held])
      before = held.get(newest, self._bases[fragment])
    if version <= newest:
      return Staging.OLD
    if form == 'value':
      encoded = payloads.from_bytes(self._wire.value, shapes, payload)
      values = self._programs.decode_value(fragment, encoded)
    elif version == newest + 1 and before is not None:
      encoded = payloads.from_bytes(self._wire.down, shapes, payload)
      values = self._programs.decode_update(fragment, before, encoded)
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

  def base(self, fragment: int) -> PieceValues:
    """The version of a fragment that was adopted last."""
    base = self._bases[fragment]
    assert base is not None
    return base

  def compile(self, batches: Any) -> None:
    """Compiles all that a learner runs, so that no boundary waits for it.

    Args:
      batches: arrays or shapes of one scan's batches.
    """
    self._programs.compile(batches)


def _named(tree: Any) -> dict[str, Any]:
  """The leaves of a tree; the order of the names is that of the leaves."""
  return {f'array_{i:05}': x for i, x in enumerate(jax.tree.leaves(tree))}
