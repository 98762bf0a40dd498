"""What happens to arrays in a virtual cluster, when its engine says so.

A scan is only noted when it begins. When the first result is needed, all scans
that have begun by then are computed, since nothing can change their learners'
states before they end. So learners whose scans overlap are computed together,
though each has its own clock.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.array_types import PieceValues
from decoupled_diloco.protocol.effects import Adopt, Merge
from decoupled_diloco.protocol.messages import Contribution, Publication
from decoupled_diloco.simulate.work import Payload
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.mesh import MeshOptions, make_mesh
from decoupled_diloco.training.step import TrainState, make_train_scan
from decoupled_diloco.training.wire_format import wire_format, wire_shapes
from decoupled_diloco.virtual.setup import VirtualSetup
from decoupled_diloco.virtual.stack import LearnerStack, Scan


class _Version(NamedTuple):
  number: int
  values: PieceValues


class _Flight(NamedTuple):
  """What is kept of a hand-over until its fate is known."""

  round: int
  decoded: PieceValues | None
  residual: Any


class _Snapshot(NamedTuple):
  """What a learner's process comes back with."""

  state: TrainState
  bases: tuple[PieceValues | None, ...]
  residuals: tuple[Any, ...]


class _Held:
  """What one learner's process holds besides its training state.

  Attributes:
    bases: per fragment, what it adopted last. All learners share the arrays.
    staged: per fragment, newer versions; once it has begun, the newest alone.
    flights: per fragment, the last hand-over.
    residuals: per fragment, the error feedback's state.
  """

  def __init__(self, num_fragments: int):
    self.has_begun = False
    self.bases: list[PieceValues | None] = [None] * num_fragments
    self.staged: list[dict[int, PieceValues]] = [
      {} for _ in range(num_fragments)
    ]
    self.flights: dict[int, _Flight] = {}
    self.residuals: list[Any] = [()] * num_fragments


class ArrayWork:
  """Real gradients, merges and adoptions.

  Args:
    setup: the cluster.
  """

  def __init__(self, setup: VirtualSetup):
    self._setup = setup
    schedule = setup.syncer.schedule
    self._steps = schedule.steps_per_scan
    self._wire = wire_format(setup.wire)
    self.initial = setup.initial_params()
    M, P = len(setup.learners), schedule.num_fragments
    outer = setup.outer
    self.model = GlobalModel(
      setup.plan,
      self.initial,
      tx=outer.optimizer(setup.syncer.budget.outer_steps(schedule)),
      merge=outer.merge,
      embedding_merge=outer.embedding_merge,
      wire=self._wire,
      num_learners=M,
    )
    self.stack = LearnerStack(
      setup.plan,
      make_train_scan(
        setup.task,
        setup.inner,
        make_mesh(MeshOptions()),
        steps_per_scan=self._steps,
        learning_rate=setup.learning_rate,
      ),
      wire=self._wire,
      adopt=setup.adopt,
      num_learners=M,
      is_vmapped=setup.is_vmapped,
    )
    shapes = [wire_shapes(setup.plan, p) for p in range(P)]
    self._up_bytes = _sizes(self._wire.up, shapes)
    self._down_bytes = _sizes(self._wire.down, shapes)
    self._value_bytes = _sizes(self._wire.value, shapes)
    self._published = [_Version(0, self.model.published(p)) for p in range(P)]
    self._held = [_Held(P) for _ in range(M)]
    self._begun: dict[int, tuple[int, int]] = {}
    self._done: dict[int, jax.Array] = {}  # Losses of scans computed ahead.
    self._loaded: dict[int, tuple[int, Any]] = {}
    self._snapshots: dict[int, _Snapshot] = {}
    self._tokens = [self._count_tokens(m) for m in range(M)]
    self.losses: list[list[float]] = [[] for _ in range(M)]

  @property
  def form(self) -> str:
    """See `Work`."""
    return self.model.form

  @property
  def value_bytes(self) -> tuple[int, ...]:
    """Size of every fragment when it is sent as a value."""
    return self._value_bytes

  def tokens_per_scan(self, learner: int) -> int:
    """See `Work`."""
    return self._tokens[learner]

  def _count_tokens(self, learner: int) -> int:
    batches = self._setup.learners[learner].batches(0, self._steps)
    for leaf in jax.tree.leaves(batches):
      if leaf.ndim < 2 or leaf.shape[0] != self._steps:
        raise ValueError(
          f'batches(0, {self._steps}) of learner {learner} must be '
          f'[{self._steps}, batch, ...], but one is {leaf.shape}; stack so '
          'many batches along a new first axis.'
        )
    self._loaded[learner] = 0, batches
    one = jax.tree.map(lambda leaf: leaf[0], batches)
    return self._steps * self._setup.task.num_tokens(one)

  # Learners.

  def stop(self, learner: int) -> None:
    """See `Work`."""
    self._held[learner] = _Held(self._setup.plan.num_fragments)
    self._begun.pop(learner, None)
    self._done.pop(learner, None)

  def stage(self, learner: int, publication: Publication, content: Any) -> None:
    """See `Work`."""
    held = self._held[learner]
    staged = held.staged[publication.fragment]
    if held.has_begun:
      staged.clear()
    staged[publication.version] = content

  def begin(
    self, learner: int, versions: tuple[int, ...], rejoin_step: int | None
  ) -> None:
    """See `Work`."""
    held = self._held[learner]
    held.has_begun = True
    for p, version in enumerate(versions):
      held.bases[p] = held.staged[p].pop(version)
    bases = [self._base(learner, p) for p in range(len(versions))]
    self.stack.begin(
      learner,
      bases,
      self._setup.stream(learner),
      rejoin_step,
    )
    held.residuals = [self._wire.up.init(base) for base in bases]

  def _base(self, learner: int, fragment: int) -> PieceValues:
    base = self._held[learner].bases[fragment]
    assert base is not None
    return base

  def snapshot(self, learner: int) -> None:
    """See `Work`."""
    held = self._held[learner]
    self._snapshots[learner] = _Snapshot(
      self.stack.snapshot(learner), tuple(held.bases), tuple(held.residuals)
    )

  def resume(self, learner: int) -> None:
    """See `Work`."""
    snapshot, held = self._snapshots[learner], self._held[learner]
    self.stack.restore(learner, snapshot.state)
    held.has_begun = True
    held.bases = list(snapshot.bases)
    held.residuals = list(snapshot.residuals)

  def adopt(self, learner: int, adopt: Adopt) -> None:
    """See `Work`."""
    held, fragment = self._held[learner], adopt.fragment
    published = held.staged[fragment].pop(adopt.version)
    flight = held.flights.get(fragment)
    decoded = None
    if flight is not None and flight.round == adopt.merged_round:
      decoded = flight.decoded
      held.residuals[fragment] = flight.residual
      del held.flights[fragment]
    base = self._base(learner, fragment)
    if adopt.is_anew:  # Relative to itself, the local copy has no progress.
      base = self.stack.values(learner, fragment)
    self.stack.adopt(learner, fragment, published, base, decoded)
    held.bases[fragment] = published

  def forget(self, learner: int, fragment: int, round_: int) -> None:
    """See `Work`."""
    flight = self._held[learner].flights.get(fragment)
    if flight is not None and flight.round == round_:
      del self._held[learner].flights[fragment]

  def hand_over(self, learner: int, contribution: Contribution) -> Payload:
    """See `Work`."""
    p = contribution.fragment
    held = self._held[learner]
    handed_over, norm = self.stack.encode(
      learner, p, self._base(learner, p), held.residuals[p]
    )
    held.flights[p] = _Flight(
      contribution.round, handed_over.decoded, handed_over.residual
    )
    found = float(norm)
    return Payload(
      self._up_bytes[p],
      found if math.isfinite(found) else None,
      handed_over.encoded,
    )

  def start_scan(self, learner: int, global_step: int, first_step: int) -> None:
    """See `Work`."""
    self._begun[learner] = global_step, first_step

  def end_scan(self, learner: int) -> float:
    """See `Work`.

    Raises:
      FloatingPointError: if the loss is not finite.
    """
    if learner not in self._done:
      self._compute()
    loss = float(self._done.pop(learner))
    if not math.isfinite(loss):
      raise FloatingPointError(
        f'The training loss of learner {learner} is {loss}: the inner '
        'optimizer has diverged. Lower inner.learning_rate, or clip more.'
      )
    losses = self.losses[learner]
    losses.append(loss)
    return loss

  def _compute(self) -> None:
    """Computes every scan that has begun."""
    begun, self._begun = self._begun, {}
    scans = [
      Scan(m, self._load(m, first_step), global_step)
      for m, (global_step, first_step) in begun.items()
    ]
    self._done.update(self.stack.scan(scans))
    # What comes next is read while the device computes.
    for m, (_, first_step) in begun.items():
      self._load(m, first_step + self._steps)

  def _load(self, learner: int, first_step: int) -> Any:
    at, batches = self._loaded[learner]
    if at != first_step:
      batches = self._setup.learners[learner].batches(first_step, self._steps)
      self._loaded[learner] = first_step, batches
    return batches

  # The syncer.

  def merge(self, merge: Merge, contents: Mapping[int, Any]) -> Payload:
    """See `Work`.

    Raises:
      FloatingPointError: if the result is not finite.
    """
    p = merge.fragment
    weights = {share.learner: share.weight for share in merge.shares}
    norm = self.model.merge_encoded(p, weights, contents).norm
    values = self.model.published(p)
    self._published[p] = _Version(merge.version, values)
    return Payload(self._down_bytes[p], norm, values)

  def value(self, fragment: int, version: int) -> Payload:
    """See `Work`."""
    published = self._published[fragment]
    assert published.number == version
    return Payload(self._value_bytes[fragment], content=published.values)


def _sizes(codec: Any, shapes: Any) -> tuple[int, ...]:
  return tuple(payloads.encoded_nbytes(codec, each) for each in shapes)
