"""The whole system in one process, with real gradients, on a virtual clock.

M learners, a syncer and the network between them: the product's protocol, merge
and codecs. Only time is not real: scans, merges and messages take as long as
the setup says, however long they take to compute. The same setup gives the same
tape and the same parameters, bit for bit.
"""

from collections.abc import Callable, Sequence

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.simulate.engine import Engine
from decoupled_diloco.virtual.array_work import ArrayWork
from decoupled_diloco.virtual.result import Books, Point, Result
from decoupled_diloco.virtual.setup import VirtualSetup


class VirtualCluster:
  """A cluster that runs once.

  Args:
    setup: what it is made of.
    on_point: told of every evaluation, as it is made.
  """

  def __init__(
    self,
    setup: VirtualSetup,
    on_point: Callable[[Point], object] = lambda point: None,
  ):
    self._setup = setup
    self._on_point = on_point
    self._points: list[Point] = []
    self.work = ArrayWork(setup)
    self._books = Books(setup.syncer, setup.plan.sizes, self.work.value_bytes)
    self.engine = Engine(setup.engine, self.work, record=self._record)
    self.engine.at(setup.max_seconds, self._stop)

  def run(self) -> Result:
    """Runs until the budget is met and everything is merged.

    Raises:
      FloatingPointError: if a loss or a merge is not finite.
    """
    self._evaluate()
    self.engine.run()
    merged = self._books.status.rounds_merged
    if self._points and self._points[-1].rounds < merged:
      self._evaluate()
    figures = [learner.figures for learner in self.engine.learners]
    adopted = sum(each.adopted for each in figures)
    overlap_steps = sum(each.overlap_steps for each in figures)
    return Result(
      points=tuple(self._points),
      params=self.work.model.params(self.work.initial),
      processed_tokens=sum(each.tokens for each in figures),
      overlap_steps=overlap_steps / adopted if adopted else None,
      training_losses=tuple(map(tuple, self.work.losses)),
      **self._books.figures(),
    )

  def _stop(self) -> None:
    if self.engine.end is None:
      reason = f'{self._setup.max_seconds:g} virtual seconds'
      self.engine.syncer.tell(ev.StopRequested(self.engine.now, reason))

  def _record(self, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
    self._books.record(event, effects)
    every = self._setup.evaluate_every_rounds
    is_due = every and self._books.status.rounds_merged % every == 0
    if isinstance(event, ev.MergeDone) and is_due:
      self._evaluate()

  def _evaluate(self) -> None:
    if self._setup.evaluate is None:
      return
    status = self._books.status
    point = Point(
      status.now,
      status.merged_tokens,
      status.rounds_merged,
      self._setup.evaluate(self.work.model.params(self.work.initial)),
    )
    self._points.append(point)
    self._on_point(point)
