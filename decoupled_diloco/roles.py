"""The roles of a run, put together from its options: syncer and learner."""

import concurrent.futures
import contextlib
import dataclasses
import importlib
import json
import math
import os
import pathlib
import signal
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decoupled_diloco import data, tasks
from decoupled_diloco.configuring import RunOptions
from decoupled_diloco.models import sampling
from decoupled_diloco.observe.tape import TapeHeader, TapeWriter
from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.fragments import FragmentPlan, fragment
from decoupled_diloco.ops.outer import from_gain
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol.learner_state import LearnerOptions
from decoupled_diloco.protocol.syncer_state import SyncerOptions
from decoupled_diloco.runtime.layout import layout_digest
from decoupled_diloco.runtime.learner_loop import LearnerLoop, Record
from decoupled_diloco.runtime.local_model import LocalModel
from decoupled_diloco.runtime.syncer_server import SyncerServer
from decoupled_diloco.storage import snapshots
from decoupled_diloco.training import evaluation, inner
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.mesh import make_mesh
from decoupled_diloco.training.step import TrainScan, make_train_scan
from decoupled_diloco.training.wire_format import wire_format
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.grpc_link import GrpcLink

# How long the last messages of the syncer may take to reach the learners.
_GOODBYE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run ended, as the syncer's process leaves it in `result.json`.

  Attributes:
    reason: why it ended, in words.
    has_met_budget: whether it ended by itself.
    is_finite: whether all global parameters are.
    loss_start, loss_end: held-out loss of the global model in nats per token,
      before and after; None if it was not asked for.
    sample: text from the trained model; '' if there is none.
    checkpoint: path of the final one.
  """

  reason: str
  has_met_budget: bool
  is_finite: bool
  loss_start: float | None
  loss_end: float | None
  sample: str
  checkpoint: str

  @property
  def is_success(self) -> bool:
    """Whether the process may exit with 0."""
    return self.has_met_budget and self.is_finite


def build_task(options: RunOptions) -> tasks.Task:
  """The task that the options name.

  Raises:
    ValueError: if it cannot be imported.
  """
  if options.task == 'language_model':
    return tasks.language_model_task(options.model)
  module, _, name = options.task.partition(':')
  try:
    function = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
      f"config.task={options.task!r} must be 'language_model' or "
      f"'package.module:function' ({error})."
    ) from error
  return function(options)


def build_plan(options: RunOptions, task: tasks.Task) -> FragmentPlan:
  """How the task's parameters are divided into fragments.

  Raises:
    ValueError: if there are fewer pieces than fragments.
  """
  return fragment(
    jax.eval_shape(task.init, jax.random.key(0)),
    num_fragments=options.schedule.num_fragments,
    pattern=options.fragments.pattern,
  )


def with_vocabulary(options: RunOptions) -> RunOptions:
  """The options with the model's vocabulary taken from the tokenizer."""
  tokenizer = data.open_tokenizer(options.data.tokenizer)
  model = dataclasses.replace(options.model, vocab_size=tokenizer.vocab_size)
  return dataclasses.replace(options, model=model)


@dataclasses.dataclass(frozen=True)
class SyncerSetup:
  """A syncer put together, and listening.

  Attributes:
    initial: the parameters that the run begins with.
    held_out: batches that the global model is measured on, or None.
    executor: where its merges run.
  """

  options: RunOptions
  task: tasks.Task
  machine_options: SyncerOptions
  initial: Any
  held_out: Any
  model: GlobalModel
  server: SyncerServer
  tape: TapeWriter
  executor: concurrent.futures.Executor


def set_up_syncer(options: RunOptions) -> SyncerSetup:
  """Builds a syncer, lets it listen, and leaves its address in the workdir.

  Raises:
    ValueError: if the options do not fit the model or the data.
    OSError: if the address or the folder cannot be used.
  """
  options = with_vocabulary(options)
  workdir = pathlib.Path(options.workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  task = build_task(options)
  plan = build_plan(options, task)
  held_out = _held_out(options)
  endpoint = GrpcEndpoint(
    options.syncer.address,
    options.transport,
    options.security,
    max_peers=2 * options.membership.num_learners + 8,
  )
  initial = jax.jit(task.init)(jax.random.key(options.seed))
  wire = wire_format(options.wire)
  model = GlobalModel(
    plan,
    initial,
    tx=from_gain(
      options.outer.gain, options.outer.momentum, options.outer.nesterov
    ),
    merge=options.outer.merge,
    wire=wire,
    num_learners=options.membership.num_learners,
  )
  machine_options = SyncerOptions(
    run_id=uuid.uuid4().hex[:12],
    layout=layout_digest(plan, options.schedule, options.wire),
    schedule=options.schedule,
    membership=options.membership,
    quorum=options.quorum,
    grace=options.grace,
    staleness=options.staleness,
    budget=options.budget,
    max_rounds_in_flight=options.lead.max_rounds_in_flight,
  )
  facts = {
    'codec_up': options.wire.up,
    'codec_down': f'{options.wire.down} {options.wire.down_form}',
    'fragment_value_bytes': [
      payloads.encoded_nbytes(wire.value, plan.shapes(p))
      for p in range(plan.num_fragments)
    ],
  }
  tape = TapeWriter(
    workdir / 'events.jsonl',
    TapeHeader.of('syncer', machine_options, plan.sizes, facts),
  )
  executor = concurrent.futures.ThreadPoolExecutor(1, 'merge')
  server = SyncerServer(
    machine_options,
    model,
    endpoint,
    executor=executor,
    record=tape.record,
    clock=_clock(),
  )
  try:
    _write_whole(workdir / 'address', server.start())
  except OSError:
    # Nothing has begun: the folder stays fit for another attempt.
    tape.close()
    (workdir / 'events.jsonl').unlink()
    raise
  return SyncerSetup(
    options=options,
    task=task,
    machine_options=machine_options,
    initial=initial,
    held_out=held_out,
    model=model,
    server=server,
    tape=tape,
    executor=executor,
  )


def run_syncer(setup: SyncerSetup) -> Result:
  """Serves a run, saves what it has made, and measures it.

  Raises:
    OSError: if the folder cannot be written.
    FloatingPointError: if a merge was not finite.
  """
  server, model = setup.server, setup.model
  workdir = pathlib.Path(setup.options.workdir)
  try:
    compiling = [
      setup.executor.submit(model.compile, p)
      for p in range(model.plan.num_fragments)
    ]
    _stop_on_signals(server.request_stop)
    finish = server.serve()
    for future in compiling:
      if not future.cancel():
        future.result()
    final = model.params(setup.initial)
    path = snapshots.save(
      str(workdir / 'checkpoint'),
      final,
      {'versions': list(server.state.versions), 'reason': finish.reason},
    )
  finally:
    server.close(_GOODBYE_SECONDS)
    setup.executor.shutdown(cancel_futures=True)
    setup.tape.close()
  result = _measure(setup, finish.reason, final, str(path))
  _write_whole(
    workdir / 'result.json', json.dumps(dataclasses.asdict(result), indent=2)
  )
  return result


def _measure(
  setup: SyncerSetup, reason: str, final: Any, checkpoint: str
) -> Result:
  # Whoever has stopped the run does not want to wait for losses and samples.
  has_met_budget = setup.server.state.has_met_budget
  held_out = setup.held_out if has_met_budget else None
  return Result(
    reason=reason,
    has_met_budget=has_met_budget,
    is_finite=all(
      bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(final)
    ),
    loss_start=_loss(setup.task, setup.initial, held_out),
    loss_end=_loss(setup.task, final, held_out),
    sample=_sample(setup.options, final) if has_met_budget else '',
    checkpoint=checkpoint,
  )


@dataclasses.dataclass(frozen=True)
class LearnerSetup:
  """A learner put together, before it looks for its syncer.

  Attributes:
    open_batches: the batches of the scans from a step of this learner on, a
      `data.Prefetcher`.
    example: the batches of one scan, to compile for.
  """

  options: RunOptions
  task: tasks.Task
  plan: FragmentPlan
  trainer: TrainScan
  machine_options: LearnerOptions
  open_batches: Callable[[int], data.Prefetcher[Any]]
  example: Any

  def loop(self, record: Record, tell: Callable[[str], None]) -> LearnerLoop:
    """A loop that can take part in a run once."""
    options = self.options
    one_batch = jax.tree.map(lambda leaf: leaf[0], self.example)
    transport = dataclasses.replace(
      options.transport,
      # In the drain, every fragment is handed over at once.
      link_queue=max(options.transport.link_queue, self.plan.num_fragments),
    )
    return LearnerLoop(
      self.machine_options,
      layout=layout_digest(self.plan, options.schedule, options.wire),
      model=LocalModel(
        self.plan,
        self.trainer,
        wire=wire_format(options.wire),
        options=options.adopt,
      ),
      link=GrpcLink(options.syncer.address, transport, options.security),
      open_batches=self.open_batches,
      tokens_per_step=self.task.num_tokens(one_batch),
      rng=jax.random.fold_in(jax.random.key(options.seed), 1 + options.learner),
      heartbeat_seconds=options.membership.heartbeat_seconds,
      connect_seconds=options.syncer.connect_seconds,
      pace=options.pace,
      record=record,
      tell=tell,
      clock=_clock(),
    )


def set_up_learner(options: RunOptions) -> LearnerSetup:
  """Everything that a learner needs before it meets the syncer.

  Raises:
    ValueError: if the options do not fit the devices, the model or the data.
    OSError: if the folder cannot be written.
  """
  options = with_vocabulary(options)
  task = build_task(options)
  plan = build_plan(options, task)
  steps = options.schedule.steps_per_scan
  trainer = make_train_scan(
    task,
    inner.inner_optimizer(options.inner),
    make_mesh(options.mesh),
    steps_per_scan=steps,
    learning_rate=lambda step, rejoin: inner.learning_rate(
      options.inner, step, rejoin
    ),
  )
  pipeline = data.TextPipeline(options.data, options.learner)

  def open_batches(position: int) -> data.Prefetcher[Any]:
    iterator = data.TextIterator(pipeline, scan_steps=steps)
    iterator.position = position
    return data.Prefetcher(iterator, place=trainer.place)

  return LearnerSetup(
    options=options,
    task=task,
    plan=plan,
    trainer=trainer,
    machine_options=LearnerOptions(
      learner=options.learner,
      schedule=options.schedule,
      max_rounds_in_flight=options.lead.max_rounds_in_flight,
      on_lead_limit=options.lead.on_lead_limit,
      keeps_progress=options.adopt.rule == 'rebase',
    ),
    open_batches=open_batches,
    example=pipeline.scan_batches(0, steps),
  )


def run_learner(setup: LearnerSetup, tell: Callable[[str], None]) -> fx.Finish:
  """Takes part in a run as one learner, until it ends.

  Raises:
    SyncerUnreachableError: if there is no syncer.
    FloatingPointError: if the inner optimizer diverges.
  """
  options = setup.options
  used, there = options.mesh.num_devices, jax.local_device_count()
  if used < there:
    tell(
      f'uses {used} of {there} devices; config.mesh.data, fsdp and tensor say '
      'how many'
    )
  folder = pathlib.Path(options.workdir) / 'learners' / str(options.learner)
  folder.mkdir(parents=True, exist_ok=True)
  header = TapeHeader.of('learner', setup.machine_options, setup.plan.sizes)
  with contextlib.closing(TapeWriter(folder / 'events.jsonl', header)) as tape:
    loop = setup.loop(tape.record, tell)
    _stop_on_signals(loop.request_stop)
    return loop.run(setup.example)


def _clock() -> Callable[[], float]:
  start = time.monotonic()
  return lambda: time.monotonic() - start


def _held_out(options: RunOptions) -> dict[str, np.ndarray] | None:
  if not options.evaluation.batches:
    return None
  return data.held_out_batches(options.data, options.evaluation.batches)


def _loss(task: tasks.Task, params: Any, held_out: Any) -> float | None:
  if held_out is None:
    return None
  count = jax.tree.leaves(held_out)[0].shape[0]
  loss = evaluation.held_out_loss(
    task,
    params,
    (jax.tree.map(lambda leaf, i=i: leaf[i], held_out) for i in range(count)),
  )
  return loss if math.isfinite(loss) else None


def _sample(options: RunOptions, params: Any) -> str:
  wanted = options.evaluation.sample_tokens
  if not wanted or options.task != 'language_model':
    return ''
  tokenizer = data.open_tokenizer(options.data.tokenizer)
  prompt = jnp.asarray(tokenizer.encode(options.evaluation.prompt), jnp.int32)
  tokens = sampling.sample(
    options.model,
    params,
    prompt[None],
    jax.random.key(options.seed),
    wanted,
    sampling.SamplingOptions(temperature=options.evaluation.temperature),
  )
  return tokenizer.decode(np.asarray(tokens)[0, prompt.size :])


def _write_whole(path: pathlib.Path, text: str) -> None:
  """Whoever sees the file sees all of it."""
  temporary = path.with_suffix('.unfinished')
  temporary.write_text(text)
  temporary.replace(path)


def _stop_on_signals(request_stop: Callable[[str], None]) -> None:
  """The first SIGINT or SIGTERM ends in order, a second one at once."""
  seen = []

  def handle(number: int, frame: Any) -> None:
    del frame
    name = signal.Signals(number).name
    if seen:
      sys.stderr.write(f'{name} again: ending at once.\n')
      sys.stderr.flush()
      os._exit(128 + number)
    seen.append(number)
    request_stop(f'stopped by {name}')

  signal.signal(signal.SIGINT, handle)
  signal.signal(signal.SIGTERM, handle)
