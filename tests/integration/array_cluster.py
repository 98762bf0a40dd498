"""The scripted cluster with real arrays: machines, codecs, merges, adoption.

`tests.protocol.cluster` decides when what happens; here the runtime's own
`LocalModel` and `GlobalModel` carry it out, payloads as bytes and all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.syncer_state import SyncerOptions
from decoupled_diloco.runtime.local_model import LocalModel, Staging
from decoupled_diloco.simulate.work import Payload
from decoupled_diloco.tasks import Task
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.inner import NEVER
from decoupled_diloco.training.mesh import MeshOptions, make_mesh
from decoupled_diloco.training.step import make_train_scan
from decoupled_diloco.training.wire_format import WireOptions, wire_format
from tests.protocol.cluster import Cluster

OVERWRITE = AdoptOptions('overwrite')
EXACT = WireOptions(up='f32', down='f32', down_error_feedback=False)


class ArrayWork:
  """What happens to arrays: one `LocalModel` per learner, one `GlobalModel`."""

  def __init__(
    self,
    model: GlobalModel,
    locals_: list[LocalModel],
    batches: Callable[[int, int], Any],
    on_merged: Callable[[], object],
  ):
    self.model = model
    self.locals = locals_
    self.form = model.form
    self._batches = batches
    self._on_merged = on_merged
    self._scans: dict[int, tuple[int, int]] = {}

  def tokens_per_scan(self, learner: int) -> int:
    local = self.locals[learner]
    batch = jax.tree.map(lambda leaf: leaf[0], self._batches(learner, 0))
    return local.trainer.steps_per_scan * local.trainer.task.num_tokens(batch)

  def stop(self, learner: int) -> None:
    raise NotImplementedError('No learner of these tests is killed.')

  def stage(
    self, learner: int, publication: msg.Publication, content: Any
  ) -> None:
    p, version = publication.fragment, publication.version
    staging = self.locals[learner].stage(p, version, publication.form, content)
    assert staging is not Staging.GAP

  def begin(
    self, learner: int, versions: tuple[int, ...], rejoin_step: int | None
  ) -> None:
    local = self.locals[learner]
    for p, version in enumerate(versions):
      local.claim(p, version)
    local.begin(
      versions,
      jax.random.key(learner),
      NEVER if rejoin_step is None else rejoin_step,
    )

  def adopt(self, learner: int, adopt: fx.Adopt) -> None:
    self.locals[learner].claim(adopt.fragment, adopt.version)
    self.locals[learner].adopt(
      adopt.fragment, adopt.version, adopt.merged_round, adopt.is_anew
    )

  def snapshot(self, learner: int) -> None:
    raise AssertionError('Nobody asks for snapshots here.')

  def resume(self, learner: int) -> None:
    raise AssertionError('Nobody asks for snapshots here.')

  def start_scan(self, learner: int, global_step: int, first_step: int) -> None:
    self._scans[learner] = global_step, first_step

  def end_scan(self, learner: int) -> float:
    global_step, first_step = self._scans.pop(learner)
    batches = self._batches(learner, first_step)
    return float(self.locals[learner].train(batches, global_step)['loss'])

  def hand_over(self, learner: int, contribution: msg.Contribution) -> Payload:
    local = self.locals[learner]
    captured = local.capture(contribution.fragment, contribution.round)
    data = local.fetch(captured)
    norm = self.model.norm_of(contribution.fragment, data)
    return Payload(len(data), norm, data)

  def forget(self, learner: int, fragment: int, round_: int) -> None:
    self.locals[learner].forget(fragment, round_)

  def merge(self, merge: fx.Merge, contents: Mapping[int, Any]) -> Payload:
    merged = self.model.merge(
      merge.fragment,
      {share.learner: share.weight for share in merge.shares},
      contents,
    )
    self._on_merged()
    return Payload(len(merged.payload), merged.norm, merged.payload)

  def value(self, fragment: int, version: int) -> Payload:
    del version
    data = self.model.value_payload(fragment)
    return Payload(len(data), content=data)


class ArrayCluster(Cluster):
  """A cluster whose learners train.

  Args:
    task: what is trained.
    plan: the fragments of its parameters.
    inner: the inner optimizer.
    outer: the outer optimizer.
    batches: `batches(learner, step)` gives the batches of the scan from that
      step of the learner on, stacked [K, batch, ...].
    wire, adopt, merge: as in the options of a run.
  """

  def __init__(
    self,
    options: SyncerOptions,
    scan_seconds: list[Callable[[], float]],
    *,
    task: Task,
    plan: FragmentPlan,
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    batches: Callable[[int, int], Any],
    wire: WireOptions = EXACT,
    adopt: AdoptOptions = OVERWRITE,
    merge: str = 'rda',
    meshes: Sequence[MeshOptions] | None = None,
    **settings: Any,
  ):
    M = len(scan_seconds)
    self.plan = plan
    self.initial = task.init(jax.random.key(0))
    formats = wire_format(wire)
    self.model = GlobalModel(
      plan,
      self.initial,
      tx=outer,
      merge=merge,
      wire=formats,
      num_learners=options.membership.num_learners,
    )
    self.locals = [
      LocalModel(
        plan,
        make_train_scan(
          task,
          inner,
          make_mesh(meshes[m] if meshes else MeshOptions()),
          steps_per_scan=options.schedule.steps_per_scan,
        ),
        wire=formats,
        options=adopt,
      )
      for m in range(M)
    ]
    self.history: list[Any] = []  # Global parameters after each merge.
    super().__init__(
      options,
      scan_seconds,
      keeps_progress=adopt.rule == 'rebase',
      work=ArrayWork(
        self.model,
        self.locals,
        batches,
        lambda: self.history.append(self.global_params()),
      ),
      **settings,
    )

  def global_params(self) -> Any:
    """The global parameters as a pytree."""
    return self.model.params(self.initial)
