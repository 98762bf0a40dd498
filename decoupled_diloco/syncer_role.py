"""The syncer of a run, put together from its options; and what it leaves."""

import concurrent.futures
import contextlib
import dataclasses
import json
import uuid
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from decoupled_diloco import building, measuring, stopping, tasks
from decoupled_diloco.final_model import FinalModel
from decoupled_diloco.observe.tape import TapeHeader, TapeWriter
from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.fragments import FragmentPlan
from decoupled_diloco.protocol.syncer_state import SyncerOptions
from decoupled_diloco.run_folder import RunFolder, write_whole
from decoupled_diloco.run_options import RunOptions
from decoupled_diloco.run_result import Result
from decoupled_diloco.runtime.layout import layout_digest
from decoupled_diloco.runtime.syncer_server import SyncerServer
from decoupled_diloco.runtime.syncer_store import (
  Restored,
  SyncerStore,
  holds_run,
)
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.wire_format import wire_format
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint

# How long the last messages of the syncer may take to reach the learners.
_GOODBYE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class SyncerSetup:
  """A syncer put together, and listening.

  Attributes:
    initial: the parameters that the run begins with.
    held_out: batches that the global model is measured on, or None.
    final: what the run ends with.
    store: what it must not lose.
    executor, saver: where its merges run, and where snapshots and the final
      model are saved.
  """

  options: RunOptions
  task: tasks.Task
  initial: Any
  held_out: Any
  model: GlobalModel
  server: SyncerServer
  final: FinalModel
  tape: TapeWriter
  store: SyncerStore
  executor: concurrent.futures.Executor
  saver: concurrent.futures.Executor

  def close(self) -> None:
    """Ends what still runs, and lets go of all files."""
    for executor in (self.executor, self.saver):
      executor.shutdown(cancel_futures=True)
    self.tape.close()
    self.store.close()


def set_up_syncer(
  options: RunOptions, tell: Callable[[str], None] = lambda text: None
) -> SyncerSetup:
  """Builds a syncer, lets it listen, and leaves its address in the workdir.

  Args:
    options: of the run.
    tell: is told what was found of a run that is continued.

  Raises:
    ValueError: if the options do not fit the model, the data, or the run that
      is to be continued.
    OSError: if the address or the folder cannot be used.
  """
  options = building.fitted_to_data(options)
  task = building.build_task(options)
  plan = building.build_plan(options, task)
  held_out = building.held_out(options)
  endpoint = GrpcEndpoint(
    options.syncer.address,
    options.transport,
    options.security,
    max_peers=2 * options.membership.num_learners + 8,
  )
  initial = jax.jit(task.init)(jax.random.key(options.seed))
  model = GlobalModel(
    plan,
    initial,
    tx=options.outer.optimizer(options.budget.outer_steps(options.schedule)),
    merge=options.outer.merge,
    embedding_merge=options.outer.embedding_merge,
    wire=wire_format(options.wire),
    num_learners=options.membership.num_learners,
  )
  folder = RunFolder(options.workdir)
  folder.make(folder.root)
  final = FinalModel(folder, model, initial)
  executor = concurrent.futures.ThreadPoolExecutor(1, 'merge')
  # Of its own: what is final shall not wait for what is being compiled.
  saver = concurrent.futures.ThreadPoolExecutor(1, 'save')
  layout = layout_digest(plan, options.schedule, options.wire)
  store = SyncerStore(
    folder.syncer,
    model,
    layout=layout,
    options=options.durability,
    executor=saver,
    tell=tell,
  )
  if warning := options.security.warning(options.syncer.address):
    tell(warning)
  with contextlib.ExitStack() as undo:
    undo.callback(store.close)
    restored = _open(store, options, tell)
    machine_options = _machine_options(options, restored.run_id, layout)
    header = _tape_header(options, machine_options, plan, restored.began_at)
    tape = undo.enter_context(
      contextlib.closing(TapeWriter(folder.tape, header))
    )
    server = SyncerServer(
      machine_options,
      model,
      endpoint,
      executor=executor,
      save=lambda: final.save(server.state),
      saver=saver,
      keep_merge=store.record,
      record=tape.record,
      clock=building.clock(restored.began_at),
    )
    if restored.life > 1:
      server.resume(restored.life, restored.state, restored.merged)
    write_whole(folder.address, server.start())
    undo.pop_all()
  return SyncerSetup(
    options=options,
    task=task,
    initial=initial,
    held_out=held_out,
    model=model,
    server=server,
    final=final,
    tape=tape,
    store=store,
    executor=executor,
    saver=saver,
  )


def _open(
  store: SyncerStore, options: RunOptions, tell: Callable[[str], None]
) -> Restored:
  """Begins a run, or finds the one that is to be continued."""
  if not (options.resume and holds_run(store.folder)):
    return store.begin(uuid.uuid4().hex[:12])
  restored = store.resume()
  for note in restored.notes:
    tell(note)
  tell(
    f'Continues run {restored.run_id}; {restored.num_replayed:,} merges came '
    'from its journal.'
  )
  return restored


def _machine_options(
  options: RunOptions, run_id: str, layout: str
) -> SyncerOptions:
  return SyncerOptions(
    run_id=run_id,
    layout=layout,
    schedule=options.schedule,
    membership=options.membership,
    quorum=options.quorum,
    grace=options.grace,
    staleness=options.staleness,
    budget=options.budget,
    max_rounds_in_flight=options.lead.max_rounds_in_flight,
    outliers=options.outliers,
  )


def _tape_header(
  options: RunOptions,
  machine_options: SyncerOptions,
  plan: FragmentPlan,
  began_at: float,
) -> TapeHeader:
  value = wire_format(options.wire).value
  facts = {
    # Unix time at which the events' clock began.
    'began_at': began_at,
    'codec_up': options.wire.up,
    'codec_down': f'{options.wire.down} {options.wire.down_form}',
    'fragment_value_bytes': [
      payloads.encoded_nbytes(value, plan.shapes(p))
      for p in range(plan.num_fragments)
    ],
  }
  return TapeHeader.of('syncer', machine_options, plan.sizes, facts)


def run_syncer(
  setup: SyncerSetup, tell: Callable[[str], None] = lambda text: None
) -> Result:
  """Serves a run, saves what it has made, and measures it.

  If the checkpoint cannot be saved, the result says so.

  Args:
    setup: of the syncer.
    tell: is told what is being done once the run is over.

  Raises:
    OSError: if the tape cannot be written.
    FloatingPointError: if a merge was not finite.
  """
  server, final = setup.server, setup.final
  stopped_by: list[int] = []
  final.tell = setup.store.tell = tell
  compiling = [
    setup.executor.submit(setup.model.compile, p)
    for p in range(setup.model.plan.num_fragments)
  ]

  def stop(number: int) -> None:
    stopped_by.append(number)
    server.request_stop(stopping.reason(number))

  try:
    stopping.in_order(stop)
    finish = server.serve()
    for future in compiling:
      if not future.cancel():
        future.result()
  finally:
    server.close(_GOODBYE_SECONDS)
    setup.close()
  result = Result(
    reason=finish.reason,
    has_met_budget=server.state.has_met_budget,
    is_finite=all(
      bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(final.params)
    ),
    checkpoint=final.path,
    failure='' if server.save_error is None else str(server.save_error),
  )
  measures = measuring.Measures()
  # Whoever has stopped the run does not want to wait for losses and samples.
  if result.has_met_budget:
    measures = measuring.measure(
      setup.options,
      setup.task,
      setup.initial,
      final.params,
      setup.held_out,
      tell=tell,
      is_unwanted=lambda: bool(stopped_by),
    )
  return _completed(setup, result, measures, stopped_by)


def _completed(
  setup: SyncerSetup,
  result: Result,
  measures: measuring.Measures,
  stopped_by: list[int],
) -> Result:
  """The result with what came last; kept in the folder, if that takes it."""
  result = dataclasses.replace(
    result,
    **measures._asdict(),
    stopped_by=stopped_by[0] if stopped_by else 0,
  )
  text = json.dumps(dataclasses.asdict(result), indent=2)
  try:
    write_whole(RunFolder(setup.options.workdir).result, text)
  except OSError as error:
    failure = result.failure or str(error)
    return dataclasses.replace(result, failure=failure)
  return result
