"""The scripted cluster with real arrays: machines, codecs, merges, adoption.

`tests.protocol.cluster` decides when what happens; here the runtime's own
`LocalModel` and `GlobalModel` carry it out, payloads as bytes and all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.syncer_state import SyncerOptions
from decoupled_diloco.runtime.local_model import LocalModel, Staging
from decoupled_diloco.tasks import Task
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.mesh import MeshOptions, make_mesh
from decoupled_diloco.training.step import make_train_scan
from decoupled_diloco.training.wire_format import WireOptions, wire_format
from tests.protocol.cluster import Cluster

OVERWRITE = AdoptOptions()
EXACT = WireOptions(up='f32', down='f32', down_error_feedback=False)


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
    self.batches = batches
    self.history: list[Any] = []  # Global fragments after each merge.
    self.losses: list[list[float]] = [[] for _ in range(M)]
    self._begun = [False] * M
    self._joining: list[dict[int, int]] = [{} for _ in range(M)]
    self._contributions: dict[tuple[int, int], bytes] = {}
    self._updates: dict[int, bytes] = {}
    self._values: dict[tuple[int, int], bytes] = {}
    super().__init__(
      options,
      scan_seconds,
      keeps_progress=adopt.rule == 'rebase',
      **settings,
    )

  def global_params(self) -> Any:
    """The global parameters as a pytree."""
    return self.model.params(self.initial)

  def _execute_for_syncer(self, effect: fx.Effect) -> None:
    match effect:
      case fx.SendFragments(fragments=fragments):
        for p in fragments:
          version = self.syncer_state.versions[p]
          self._values[p, version] = self.model.value_payload(p)
      case fx.Merge(round=round_, fragment=p):
        payloads = {
          share.learner: self._contributions[share.learner, round_]
          for share in effect.shares
        }
        self._updates[round_] = self.model.merge(
          p,
          {share.learner: share.weight for share in effect.shares},
          payloads,
        ).payload
        self.history.append(self.global_params())
    super()._execute_for_syncer(effect)

  def _tell_learner(self, m: int, event: ev.Event) -> None:
    if not self.learners[m].is_alive:
      return
    local = self.locals[m]
    match event:
      case ev.MessageArrived(message=msg.Publication() as publication):
        p, version = publication.fragment, publication.version
        payload = (
          self._updates[publication.round]
          if publication.form == 'update'
          else self._values[p, version]
        )
        staging = local.stage(p, version, publication.form, payload)
        assert staging is not Staging.GAP
      case ev.ScanEnded(steps=steps):
        learner = self.learners[m]
        batch = self.batches(m, learner.state.total_steps)
        metrics = local.train(batch, learner.starts[-1])
        self.losses[m].append(float(metrics['loss']))
        del steps
    super()._tell_learner(m, event)

  def _execute_for_learner(self, m: int, effect: fx.Effect) -> None:
    local = self.locals[m]
    match effect:
      case fx.HandOver(contribution=contribution):
        captured = local.capture(contribution.fragment, contribution.round)
        self._contributions[m, contribution.round] = local.fetch(captured)
      case fx.Adopt() if self._begun[m]:
        local.claim(effect.fragment, effect.version)
        local.adopt(effect.fragment, effect.version, effect.merged_round)
      case fx.Adopt():
        local.claim(effect.fragment, effect.version)
        self._joining[m][effect.fragment] = effect.version
        if len(self._joining[m]) == self.plan.num_fragments:
          versions = [v for _, v in sorted(self._joining[m].items())]
          local.begin(versions, jax.random.key(m))
          self._begun[m] = True
      case fx.Forget(round=round_, fragment=p):
        local.forget(p, round_)
    super()._execute_for_learner(m, effect)
