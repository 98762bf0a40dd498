"""Syncer server and learner loops on real threads, in one process."""

import concurrent.futures
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco import tasks
from decoupled_diloco.ops.adopt import AdoptOptions
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.learner import learner_machine
from decoupled_diloco.protocol.learner_state import LearnerOptions
from decoupled_diloco.protocol.machine import replay
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.syncer import syncer_machine
from decoupled_diloco.protocol.syncer_state import SyncerOptions
from decoupled_diloco.runtime.learner_loop import LearnerLoop
from decoupled_diloco.runtime.learner_receiver import SyncerUnreachableError
from decoupled_diloco.runtime.local_model import LocalModel
from decoupled_diloco.runtime.syncer_server import SyncerServer
from decoupled_diloco.runtime.throttle import ThrottleOptions
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.mesh import MeshOptions, make_mesh
from decoupled_diloco.training.step import TrainScan, make_train_scan
from decoupled_diloco.training.wire_format import WireOptions, wire_format
from decoupled_diloco.transport.grpc_endpoint import GrpcEndpoint
from decoupled_diloco.transport.grpc_link import GrpcLink
from decoupled_diloco.transport.memory import MemoryNetwork
from decoupled_diloco.transport.options import TransportOptions
from tests.protocol.cluster import syncer_options

H, P, WIDTH = 8, 4, 96
K = H // P
DEADLINE_SECONDS = 30.0
ENDLESS = 1_000_000  # Rounds: the test ends the run.
WIRE = WireOptions()


def _init(rng):
  keys = jax.random.split(rng, P)
  return {f'w{p}': jax.random.normal(keys[p], (WIDTH,)) for p in range(P)}


def _loss(params, batch, rng):
  """A quadratic bowl around 3, seen through noise."""
  del rng
  return sum(
    jnp.sum(jnp.square(params[f'w{p}'] - 3.0 - batch['noise'][0]))
    for p in range(P)
  )


TASK = tasks.jax_task(_init, _loss)


def _batches(learner: int, position: int) -> Iterator[dict[str, np.ndarray]]:
  for step in itertools.count(position, K):
    rng = np.random.default_rng((learner, step))
    noise = rng.normal(size=(K, 1, WIDTH)).astype(np.float32) * 0.02
    yield {'noise': noise}


@pytest.fixture(scope='module')
def plan():
  return fragment(jax.eval_shape(_init, jax.random.key(0)), num_fragments=P)


@pytest.fixture(scope='module')
def trainers() -> list[TrainScan]:
  """One for each of three learners; compiled once for all tests."""
  return [
    make_train_scan(
      TASK, optax.sgd(0.3), make_mesh(MeshOptions()), steps_per_scan=K
    )
    for _ in range(3)
  ]


@dataclasses.dataclass
class _Learner:
  """A learner loop on a thread of its own."""

  loop: LearnerLoop
  thread: concurrent.futures.Future
  tape: list


class _Run:
  """A server, and learners that can be started at any time."""

  def __init__(self, kind: str, options: SyncerOptions, plan, trainers):
    self.options = options
    self.plan = plan
    self.trainers = trainers
    self.tape = []
    self.network = MemoryNetwork(
      TransportOptions(link_queue=P), is_automatic=True
    )
    self.kind = kind
    self.initial = _init(jax.random.key(7))
    self.changed = threading.Condition()
    endpoint = (
      GrpcEndpoint('127.0.0.1:0') if kind == 'grpc' else self.network.endpoint()
    )
    self.merging = concurrent.futures.ThreadPoolExecutor(1)
    self.save = lambda: None
    self.server = SyncerServer(
      options,
      GlobalModel(
        plan,
        self.initial,
        tx=optax.sgd(1.0),
        merge='rda',
        wire=wire_format(WIRE),
        num_learners=options.membership.num_learners,
      ),
      endpoint,
      executor=self.merging,
      save=lambda: self.save(),
      record=self._record,
    )
    self.address = self.server.start()
    self.threads = concurrent.futures.ThreadPoolExecutor(8)
    self.served = self.threads.submit(self.server.serve)
    self.learners: list[_Learner] = []

  def _record(self, event, effects):
    with self.changed:
      self.tape.append((event, tuple(effects)))
      self.changed.notify_all()

  def learner(
    self, m: int, rule: str = 'rebase', step_seconds: float = 0.0, link=None
  ) -> _Learner:
    tape = []
    if link is None:
      link = (
        GrpcLink(self.address, TransportOptions(link_queue=P))
        if self.kind == 'grpc'
        else self.network.link()
      )
    loop = LearnerLoop(
      LearnerOptions(
        m,
        self.options.schedule,
        self.options.max_rounds_in_flight,
        'train',
        rule == 'rebase',
      ),
      layout=self.options.layout,
      model=LocalModel(
        self.plan,
        self.trainers[m],
        wire=wire_format(WIRE),
        options=AdoptOptions(rule, alpha=0.5 if rule == 'mix' else 0.0),
      ),
      link=link,
      open_batches=lambda position: _batches(m, position),
      tokens_per_step=WIDTH,
      rng=jax.random.key(m),
      heartbeat_seconds=0.05,
      connect_seconds=30.0,
      throttle=ThrottleOptions(step_seconds),
      record=lambda event, effects: tape.append((event, tuple(effects))),
    )
    example = next(_batches(m, 0))
    learner = _Learner(loop, self.threads.submit(loop.run, example), tape)
    self.learners.append(learner)
    return learner

  def wait_until(self, condition: Callable[[], bool]) -> None:
    """Waits for a condition on the tape, the machine or the learners."""
    with self.changed:
      assert self.changed.wait_for(condition, DEADLINE_SECONDS)

  def merges_with(self, m: int) -> int:
    """In how many merges a learner took part."""
    return sum(
      m in {share.learner for share in effect.shares}
      for _, effects in self.tape
      for effect in effects
      if isinstance(effect, fx.Merge)
    )

  def end(self) -> fx.Finish:
    """Waits for everybody."""
    for learner in self.learners:
      learner.thread.result(DEADLINE_SECONDS)
    return self.served.result(DEADLINE_SECONDS)

  def close(self):
    self.server.request_stop('the test is over')
    for learner in self.learners:
      learner.loop.request_stop('the test is over')
    self.server.close(1.0)
    self.threads.shutdown()
    self.merging.shutdown()


@pytest.fixture
def start(request, plan, trainers):
  runs = []

  def start_run(kind: str, M: int = 2, k_min: int = 1, rounds: int = 60):
    options = syncer_options(
      M=M,
      k_min=k_min,
      H=H,
      P=P,
      rounds=rounds,
      membership=MembershipOptions(
        M, heartbeat_seconds=0.05, liveness_timeout_seconds=30.0
      ),
    )
    runs.append(_Run(kind, options, plan, trainers))
    return runs[-1]

  yield start_run
  for run in runs:
    run.close()


@pytest.mark.parametrize('kind', ['memory', 'grpc'])
@pytest.mark.parametrize('rule', ['overwrite', 'mix', 'rebase'])
def test_a_run_from_end_to_end(start, kind, rule):
  run = start(kind)
  for m in range(2):
    run.learner(m, rule, step_seconds=0.001 * (m + 1))
  finish = run.end()
  assert finish.reason == '60 rounds'
  assert all(run.merges_with(m) > 0 for m in range(2))
  # The bowl's bottom is 3. Each of the 15 or more updates of a fragment sets it
  # to the learners' average, up to a 14th of the largest delta (4 bits), which
  # the next corrects; noise of 0.02 remains.
  final = run.server._model.params(run.initial)
  for values in jax.tree.leaves(final):
    np.testing.assert_allclose(values, 3.0, atol=0.3)
  # All tapes replay.
  assert replay(syncer_machine(run.options), run.tape) == len(run.tape)
  for learner in run.learners:
    machine = learner_machine(learner.loop._options)
    assert replay(machine, learner.tape) == len(learner.tape)


@pytest.mark.parametrize('kind', ['memory', 'grpc'])
def test_learners_stay_until_what_is_final_is_saved(start, kind):
  run = start(kind, rounds=12)
  is_alive = []

  def beats(m):
    return sum(
      isinstance(event, ev.MessageArrived)
      and isinstance(event.message, msg.Heartbeat)
      and event.message.learner == m
      for event, _ in run.tape
    )

  def save():
    # While it saves, the server hears ten heartbeats from either learner.
    before = [beats(m) for m in range(2)]
    run.wait_until(lambda: all(beats(m) > before[m] + 10 for m in range(2)))
    is_alive.extend(not learner.thread.done() for learner in run.learners)

  run.save = save
  for m in range(2):
    run.learner(m)
  assert run.end().reason == '12 rounds'
  assert is_alive == [True, True]
  for learner in run.learners:
    assert learner.thread.result().reason == '12 rounds'
  assert replay(syncer_machine(run.options), run.tape) == len(run.tape)


def test_a_checkpoint_that_cannot_be_saved_is_said_to_all(start):
  run = start('memory', rounds=12)
  error = OSError('no space left on device')

  def save():
    raise error

  run.save = save
  for m in range(2):
    run.learner(m)
  finish = run.end()
  assert finish.is_failure
  assert 'the final checkpoint is lost: no space' in finish.reason
  assert run.server.save_error is error
  for learner in run.learners:
    assert learner.thread.result().reason == finish.reason


@pytest.mark.parametrize('kind', ['memory', 'grpc'])
def test_learners_hold_the_same_bits_as_the_syncer(start, kind):
  """Updates in 4 bits, applied by everybody: all copies stay identical."""
  run = start(kind)
  for m in range(2):
    run.learner(m)
  run.end()
  state = run.server.state
  for learner in run.learners:
    ledgers = learner.loop.state.ledgers
    for p in range(P):
      if ledgers[p].base_version == state.versions[p]:
        published = run.server._model._values[p]
        for ours, theirs in zip(
          learner.loop._model.base(p), published, strict=True
        ):
          np.testing.assert_array_equal(ours, theirs)
  held = [
    learner.loop.state.ledgers[p].base_version == state.versions[p]
    for learner in run.learners
    for p in range(P)
  ]
  assert any(held)


@pytest.mark.parametrize('kind', ['memory', 'grpc'])
def test_a_learner_leaves_and_comes_back(start, kind):
  run = start(kind, M=3, rounds=ENDLESS)
  run.learner(0, step_seconds=0.002)
  run.learner(1, step_seconds=0.002)
  run.learner(2, step_seconds=0.002)
  run.wait_until(lambda: run.merges_with(2) > 2)
  run.learners[2].loop.request_stop('leaves')
  assert run.learners[2].thread.result(DEADLINE_SECONDS).reason == 'leaves'
  again = run.learner(2, step_seconds=0.002)

  def welcomes():
    return [
      event.message
      for event, _ in again.tape
      if isinstance(event, ev.MessageArrived)
      and isinstance(event.message, msg.Welcome)
    ]

  run.wait_until(lambda: bool(welcomes()))
  # What its former life has handed over may be merged still.
  before = run.merges_with(2) + P
  run.wait_until(lambda: run.merges_with(2) > before)
  (welcome,) = welcomes()
  assert welcome.total_steps > 0  # It reads on where it had left.
  run.server.request_stop('seen enough')
  run.end()


def test_a_partition_is_survived(start):
  run = start('memory', rounds=ENDLESS)
  link = run.network.link()
  run.learner(0, step_seconds=0.002)
  run.learner(1, step_seconds=0.002, link=link)
  run.wait_until(lambda: run.merges_with(1) > 2)
  steps = run.learners[1].loop.state.total_steps
  run.network.partition(link)
  run.network.sever(link)
  run.wait_until(
    lambda: run.learners[1].loop.state.total_steps > steps + 10 * K
  )  # It trains on.
  merged = run.merges_with(1)
  run.network.heal(link)
  run.wait_until(lambda: run.merges_with(1) > merged)
  run.server.request_stop('seen enough')
  run.end()


def test_corrupted_payloads_are_sent_again(start):
  """What was refused as corrupt is accepted for the same round afterwards."""
  # K_min=2: no round is over before it has come again.
  run = start('memory', k_min=2, rounds=ENDLESS)
  link = run.network.link()
  run.learner(0, step_seconds=0.002)
  run.learner(1, step_seconds=0.002, link=link)
  run.wait_until(lambda: run.merges_with(1) > 2)

  def effects():
    return [effect for _, effects in run.tape for effect in effects]

  def rounds_sent_again():
    corrupt = {
      effect.message.round
      for effect in effects()
      if isinstance(effect, fx.Send)
      and isinstance(effect.message, msg.Refusal)
      and effect.message.reason is msg.Reason.CORRUPT
    }
    return corrupt & {
      effect.round
      for effect in effects()
      if isinstance(effect, fx.Accept) and effect.learner == 1
    }

  def receipts():
    return sum(
      isinstance(event, ev.MessageArrived)
      and isinstance(event.message, msg.Receipt)
      and event.message.learner == 1
      for event, _ in run.tape
    )

  # A flipped bit may also hit a publication, so it takes a few. When one has
  # been received, a contribution is likely to be next.
  for _ in range(40):
    count, before = receipts(), run.merges_with(1)
    run.wait_until(lambda count=count: receipts() > count)
    run.network.corrupt_next(link)
    run.wait_until(lambda before=before: run.merges_with(1) > before)
    if rounds_sent_again():
      break
  assert rounds_sent_again()
  run.server.request_stop('seen enough')
  run.end()


def test_no_syncer_is_a_sentence(plan, trainers):
  network = MemoryNetwork()
  options = syncer_options(M=1, H=H, P=P)
  loop = LearnerLoop(
    LearnerOptions(0, options.schedule, 4, 'train', False),
    layout='layout',
    model=LocalModel(
      plan,
      trainers[0],
      wire=wire_format(WIRE),
      options=AdoptOptions(),
    ),
    link=network.link(),
    open_batches=lambda position: _batches(0, position),
    tokens_per_step=WIDTH,
    rng=jax.random.key(0),
    heartbeat_seconds=0.05,
    connect_seconds=0.2,
  )
  with pytest.raises(SyncerUnreachableError, match='no syncer has answered'):
    loop.run(next(_batches(0, 0)))
