"""One protocol, several shells: the same events have the same effects.

A trace is the syncer's tape of the scripted cluster, a discrete-event
simulation. Its events are then brought about at the real server, on the
in-memory transport, with a scripted clock and with merges that end when the
trace says so. Whatever shell comes next can be held against the same traces.
"""

import random
from concurrent.futures import Executor, Future

import jax.numpy as jnp
import optax
import pytest

from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.machine import replay
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.syncer import syncer_machine
from decoupled_diloco.protocol.syncer_state import SyncerOptions
from decoupled_diloco.runtime.syncer_server import SyncerServer
from decoupled_diloco.training.global_model import GlobalModel
from decoupled_diloco.training.wire_format import wire_format
from decoupled_diloco.transport.memory import MemoryNetwork
from tests.integration.array_cluster import EXACT
from tests.protocol.cluster import Cluster, syncer_options

Tape = list[tuple[ev.Event, tuple[fx.Effect, ...]]]


class _ScriptedExecutor(Executor):
  """Runs what was submitted when it is told to, in order."""

  def __init__(self):
    self._waiting = []

  def submit(self, fn, /, *args, **kwargs):
    future = Future()
    self._waiting.append((future, lambda: fn(*args, **kwargs)))
    return future

  def run_until(self, kind: type) -> None:
    """Runs what was submitted until that has made something of this kind.

    Fragments are encoded between the merges, which is no event of a machine.
    """
    made = None
    while not isinstance(made, kind):
      future, work = self._waiting.pop(0)
      made = work()
      future.set_result(made)


class _ServedTrace:
  """A real server to which the events of a trace happen."""

  def __init__(self, options: SyncerOptions):
    self.now = 0.0
    self.tape: Tape = []
    P = options.schedule.num_fragments
    like = {f'w{p}': jnp.zeros((4,)) for p in range(P)}
    self._plan = fragment(like, num_fragments=P)
    self._executor = _ScriptedExecutor()
    self._network = MemoryNetwork()
    self._links = {}
    self.server = SyncerServer(
      options,
      GlobalModel(
        self._plan,
        like,
        tx=optax.sgd(1.0),
        merge='rda',
        wire=wire_format(EXACT),
        num_learners=options.membership.num_learners,
      ),
      self._network.endpoint(),
      executor=self._executor,
      record=lambda event, effects: self.tape.append((event, tuple(effects))),
      clock=lambda: self.now,
    )
    self.server.start()

  def bring_about(self, event: ev.Event) -> None:
    """Makes an event of the trace happen to the server."""
    self.now = event.now
    match event:
      case ev.MessageArrived(message=msg.Hello() as hello):
        link = self._network.link()
        link.start()
        self._network.deliver()
        assert link.receive(0.0) is not None  # LinkUp.
        self._links[hello.learner] = link
        link.send(hello)
      case ev.MessageArrived(message=msg.Contribution() as contribution):
        shapes = self._plan.shapes(contribution.fragment)
        nbytes = payloads.encoded_nbytes(wire_format(EXACT).up, shapes)
        self._links[contribution.learner].send(contribution, bytes(nbytes))
      case ev.MessageArrived(message=message):
        self._links[getattr(message, 'learner')].send(message)  # noqa: B009
      case ev.ConnectionLost(learner=learner):
        self._network.sever(self._links[learner])
      case ev.MergeDone() | ev.Saved():
        self._executor.run_until(type(event))
    self._network.deliver()
    while self.server.serve_once(block=False):
      self._network.deliver()


def _decisions(tape: Tape) -> list[tuple[str, float, tuple[fx.Effect, ...]]]:
  """Events by kind and time, with effects; alarms that decided nothing apart.

  An event's measured facts (sizes, norms) are those of its shell.
  """
  return [
    (type(event).__name__, event.now, effects)
    for event, effects in tape
    if effects or not isinstance(event, ev.TimePassed)
  ]


def _trace(seed: int, *, k_min: int) -> tuple[SyncerOptions, Tape]:
  """Four learners of unequal speed; one is killed, one falls silent."""
  rng = random.Random(seed)
  speeds = [1.0, 1.1, 1.5, 2.3]
  options = syncer_options(
    M=4,
    k_min=k_min,
    H=12,
    P=6,
    rounds=40,
    membership=MembershipOptions(4, liveness_timeout_seconds=8.0),
  )
  cluster = Cluster(
    options,
    [lambda s=s: s * rng.uniform(0.9, 1.1) for s in speeds],
    latency=0.2,
    merge_seconds=0.3,
  )
  cluster.at(10.5, lambda: cluster.kill(2))
  cluster.at(14.25, lambda: cluster.start(2))
  cluster.at(16.5, lambda: cluster.partition(1, is_noticed=False))
  cluster.at(29.75, lambda: cluster.heal(1))
  cluster.run()
  assert cluster.end is not None
  return options, cluster.tape


@pytest.mark.parametrize(('seed', 'k_min'), [(0, 1), (1, 2), (2, 3)])
def test_server_and_simulation_decide_alike(seed, k_min):
  options, tape = _trace(seed, k_min=k_min)
  served = _ServedTrace(options)
  for event, _ in tape:
    served.bring_about(event)
  assert _decisions(served.tape) == _decisions(tape)
  # The trace is worth its name: it holds faults, grace and a whole run.
  effects = [effect for _, effects in tape for effect in effects]
  kinds = {type(effect) for effect in effects}
  assert {fx.GraceBegan, fx.Merge, fx.Disconnect, fx.Finish} <= kinds
  # And the server's own tape replays.
  assert replay(syncer_machine(options), served.tape) == len(served.tape)


def test_a_shell_that_decides_otherwise_is_caught():
  options, tape = _trace(0, k_min=1)
  served = _ServedTrace(options)
  late = next(
    index
    for index, (event, _) in enumerate(tape)
    if isinstance(event, ev.MessageArrived)
    and isinstance(event.message, msg.Contribution)
  )
  for event, _ in tape[:late] + tape[late + 1 :]:
    if not isinstance(event, ev.MergeDone | ev.Saved):
      served.bring_about(event)
  assert _decisions(served.tape) != _decisions(tape)
