"""The syncer's shell, without any arrays, and mostly without any threads."""

import concurrent.futures
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.messages import Reason
from decoupled_diloco.protocol.outliers import OutlierOptions
from decoupled_diloco.runtime.syncer_server import SyncerServer
from decoupled_diloco.training.global_model import GlobalModel, Merged
from decoupled_diloco.transport.base import Parcel
from tests.protocol.cluster import syncer_options
from tests.runtime.waiting_executor import WaitingExecutor

P = 2
DEADLINE_SECONDS = 30.0
SOUND = b'1.0'  # A payload is its norm; of any other length, it is no payload.
NAN = b'nan'


class Model:
  """Stands for the arrays: its values are its versions."""

  form = 'update'

  def __init__(self):
    self.plan = SimpleNamespace(num_fragments=P)
    self.versions = [0] * P

  def norm_of(self, fragment, payload):
    del fragment
    if len(payload) != 3:
      raise ValueError('wrong length')
    norm = float(payload)
    return norm if norm == norm else None

  def merge(self, fragment, weights, contributions):
    assert weights.keys() == contributions.keys()
    self.versions[fragment] += 1
    return Merged(b'update to v%d' % self.versions[fragment], 1.0, ())

  def value_payload(self, fragment):
    return b'value v%d' % self.versions[fragment]


class Endpoint:
  """Keeps what is sent; the test speaks for the peers."""

  address = 'memory:1'

  def __init__(self):
    self.sent: list[tuple[int, msg.Message, bytes]] = []
    self.disconnected: list[tuple[int, str]] = []
    self.room_for_payloads = 1000

  def start(self, on_parcel, on_lost):
    self.on_parcel, self.on_lost = on_parcel, on_lost

  def send(self, peer, message, payload=b''):
    if payload:
      if not self.room_for_payloads:
        return False
      self.room_for_payloads -= 1
    self.sent.append((peer, message, bytes(payload)))
    return True

  def disconnect(self, peer, reason):
    self.disconnected.append((peer, reason))

  def close(self, drain_seconds):
    del drain_seconds


class Run:
  """A server whose learner m is peer 10 + m (20 + m, when it comes again)."""

  def __init__(self, M=2, save=lambda: None, record=None, **overrides):
    self.options = syncer_options(
      M=M, H=P, P=P, **({'rounds': 1000} | overrides)
    )
    self.now = 0.0
    self.tape: list[tuple[ev.Event, tuple[fx.Effect, ...]]] = []
    self.endpoint = Endpoint()
    self.executor = WaitingExecutor()
    self.model = Model()
    self.peers: dict[int, int] = {}
    self.server = SyncerServer(
      self.options,
      cast(GlobalModel, self.model),
      cast(Any, self.endpoint),
      executor=self.executor,
      save=save,
      record=record or self._record,
      clock=lambda: self.now,
    )
    self.server.start()

  def _record(self, event, effects):
    self.tape.append((event, tuple(effects)))

  def step(self):
    """Takes what is in the inbox."""
    while self.server.serve_once(block=False):
      pass

  def work(self):
    """Lets the executor do everything, one thing after the other."""
    while self.executor.waiting:
      self.executor.run_next()
      self.step()

  def say(self, m, message, payload=b'', is_intact=True):
    parcel = Parcel(message, payload, is_intact, 10 + len(payload))
    self.endpoint.on_parcel(self.peers[m], parcel)
    self.step()

  def hello(self, m: int, **fields):
    self.peers[m] = self.peers.get(m, m) + 10
    self.say(m, msg.Hello(m, self.options.layout, **fields))

  def incarnation(self, m):
    return self.server.state.members[m].incarnation

  def join(self, m):
    self.hello(m)
    self.work()
    self.say(m, msg.Ready(m, self.incarnation(m)))

  def contribute(self, m, round_, payload=SOUND, total_steps=1, **settings):
    fragment = round_ % P
    contribution = msg.Contribution(
      learner=m,
      incarnation=self.incarnation(m),
      round=round_,
      fragment=fragment,
      base_version=self.server.state.versions[fragment],
      steps=1,
      tokens=100,
      total_steps=total_steps,
      total_tokens=100,
      step_seconds=1.0,
    )
    self.say(m, contribution, payload, **settings)

  def sent_to(self, m, kind) -> list[tuple[Any, bytes]]:
    """What the present connection of a learner was sent, with payloads."""
    return [
      (message, payload)
      for peer, message, payload in self.endpoint.sent
      if peer == self.peers[m] and isinstance(message, kind)
    ]

  def publications(self, m):
    return [
      (message.fragment, message.version, payload.decode())
      for message, payload in self.sent_to(m, msg.Publication)
    ]

  def reasons(self, m):
    return [message.reason for message, _ in self.sent_to(m, msg.Refusal)]


@pytest.fixture
def run():
  """Two learners that have joined; round 0 is open."""
  made = Run()
  for m in (0, 1):
    made.join(m)
  return made


# The end.


def _drain(run):
  """Everybody says farewell: only the saving is left."""
  run.server.request_stop('enough')
  run.step()
  for m in run.peers:
    run.say(m, msg.Farewell(m, run.incarnation(m), 'drained'))


def test_the_end_is_told_when_the_final_checkpoint_is_saved():
  saved = []
  run = Run(save=lambda: saved.append(run.server.state.versions))
  for m in (0, 1):
    run.join(m)
  _drain(run)
  assert not saved  # Not on the thread of the machine.
  # Learners are heard, and not told anything yet.
  run.say(0, msg.Heartbeat(0, 1, 'draining', 1, 100, 0.0))
  assert not run.sent_to(0, msg.RunEnded)
  run.work()
  assert saved == [(0, 0)]
  for m in (0, 1):
    assert run.sent_to(m, msg.RunEnded) == [
      (msg.RunEnded('enough', is_early=True), b'')
    ]
  assert run.tape[-1][1][-1] == fx.Finish('enough')
  assert run.server.save_error is None


def test_a_checkpoint_that_cannot_be_saved_ends_the_run_as_a_failure():
  def save():
    raise OSError('no space left on device')

  run = Run(save=save)
  run.join(0)
  run.join(1)
  _drain(run)
  run.work()
  (((ended, _),)) = run.sent_to(1, msg.RunEnded)
  assert ended.reason == (
    'enough, but the final checkpoint is lost: no space left on device'
  )
  assert run.tape[-1][1][-1] == fx.Finish(ended.reason, is_failure=True)
  assert isinstance(run.server.save_error, OSError)


def test_while_it_saves_the_server_goes_on_and_the_tape_is_whole():
  # On real threads: the machine's, the tape's, and that of the save.
  is_saving, may_save = threading.Event(), threading.Event()
  changed, tape, threads = threading.Condition(), [], set()

  def save():
    threads.add(threading.get_ident())
    is_saving.set()
    assert may_save.wait(DEADLINE_SECONDS)

  def record(event, effects):
    threads.add(threading.get_ident())
    with changed:
      tape.append((event, effects))
      changed.notify_all()

  run = Run(M=1, save=save, record=record)
  with concurrent.futures.ThreadPoolExecutor(2) as threadpool:
    run.server._executor = run.server._saver = threadpool
    served = threadpool.submit(
      lambda: (threading.get_ident(), run.server.serve())
    )

    def say(message):
      run.endpoint.on_parcel(10, Parcel(message, b'', True, 10))
      with changed:
        assert changed.wait_for(
          lambda: any(
            isinstance(event, ev.MessageArrived) and event.message is message
            for event, _ in tape
          ),
          DEADLINE_SECONDS,
        )

    say(msg.Hello(0, run.options.layout))
    run.server.request_stop('enough')
    say(msg.Farewell(0, 1, 'drained'))
    # If the farewell overtook the request, the drain asks for another.
    say(msg.Farewell(0, 1, 'drained'))
    assert is_saving.wait(DEADLINE_SECONDS)
    say(msg.Heartbeat(0, 1, 'draining', 0, 0, 0.0))
    assert not served.done()
    may_save.set()
    machine_thread, finish = served.result(DEADLINE_SECONDS)
  assert finish == fx.Finish('enough')
  assert tape[-1][1][-1] == finish  # Written before `serve` returned.
  assert machine_thread not in threads
  assert len(threads) == 2


def test_a_tape_that_cannot_be_written_ends_the_run():
  def record(event, effects):
    raise OSError('no space left on device')

  run = Run(record=record)
  # The message was put in before, so that there is something to write.
  parcel = Parcel(msg.Hello(0, run.options.layout), b'', True, 10)
  run.endpoint.on_parcel(10, parcel)
  run.server.request_stop('enough')
  with pytest.raises(OSError, match='no space left'):
    run.server.serve()
  # Transport threads that come now are not held.
  for _ in range(1000):
    run.endpoint.on_parcel(10, parcel)


# Values for those who join.


def test_a_value_is_encoded_off_the_thread_of_the_machine():
  run = Run()
  run.hello(0)
  assert not run.publications(0)
  run.work()
  assert run.publications(0) == [(0, 0, 'value v0'), (1, 0, 'value v0')]


def test_a_merge_meanwhile_neither_tears_a_value_nor_overtakes_it(run):
  run.endpoint.on_lost(run.peers[1], 'cut')
  run.hello(1)
  assert len(run.executor.waiting) == 1  # Fragment 0 is to be encoded.
  run.contribute(0, 0)
  run.contribute(0, 1)
  run.now = 10.0  # The grace is over.
  run.step()
  assert run.server.is_merging(0)
  run.work()
  # What is called version 0 is version 0, and its update comes after it.
  of_fragment_0 = [p for p in run.publications(1) if p[0] == 0]
  assert of_fragment_0 == [(0, 0, 'value v0'), (0, 1, 'update to v1')]


def test_who_joins_during_a_merge_gets_its_result_as_a_value(run):
  run.endpoint.on_lost(run.peers[1], 'cut')
  run.contribute(0, 0)  # Everybody who is connected: it is merged at once.
  assert run.server.is_merging(0)
  run.hello(1)
  run.work()
  assert sorted(run.publications(1)) == [
    (0, 1, 'value v1'),
    (1, 0, 'value v0'),
  ]
  messages = [message for message, _ in run.sent_to(1, msg.Publication)]
  by_fragment = {message.fragment: message for message in messages}
  assert (by_fragment[0].round, by_fragment[0].form) == (0, 'value')
  assert by_fragment[0].merged_round == -1


def test_a_value_names_the_last_round_in_which_its_learner_was_merged(run):
  for m in (0, 1):
    run.contribute(m, 0)
  run.work()
  run.say(1, msg.Lacking(1, run.incarnation(1), (0,)))
  run.work()
  message, payload = run.sent_to(1, msg.Publication)[-1]
  assert (message.version, payload) == (1, b'value v1')
  assert (message.round, message.merged_round) == (0, 0)


def test_what_found_no_room_is_sent_as_a_value_at_a_sign_of_life(run):
  before = len(run.publications(1))
  run.endpoint.room_for_payloads = 0
  for m in (0, 1):
    run.contribute(m, 0)
  run.work()
  assert len(run.publications(1)) == before
  run.endpoint.room_for_payloads = 1000
  run.say(1, msg.Heartbeat(1, run.incarnation(1), 'training', 1, 100, 0.0))
  run.work()
  assert run.publications(1)[before:] == [(0, 1, 'value v1')]


# What is refused.


@pytest.mark.parametrize(
  ('payload', 'is_intact', 'reason'),
  [
    (b'1.00', True, Reason.WRONG_LAYOUT),
    (b'', True, Reason.WRONG_LAYOUT),
    (b'', False, Reason.CORRUPT),
    (NAN, True, Reason.NOT_FINITE),
  ],
)
def test_a_payload_is_refused_for_what_is_wrong_with_it(
  run, payload, is_intact, reason
):
  run.contribute(1, 0, payload, is_intact=is_intact)
  assert run.reasons(1) == [reason]


def test_a_sick_learner_is_told_why_it_is_sent_away():
  run = Run(outliers=OutlierOptions(max_refusals=2))
  for m in (0, 1):
    run.join(m)
  run.contribute(1, 0, NAN, total_steps=1)
  run.contribute(1, 0, NAN, total_steps=2)
  (((rejection, _),)) = run.sent_to(1, msg.Rejection)
  assert 'learner 1 is quarantined: 2 unsound' in rejection.reason
  assert run.endpoint.disconnected == [(run.peers[1], rejection.reason)]
  run.hello(1, run_id='run', incarnation=2)
  assert len(run.sent_to(1, msg.Rejection)) == 1
  assert not run.sent_to(1, msg.Welcome)


def test_an_opened_round_is_told_to_those_who_need_it(run):
  """Learner 0 sets the pace alone; 1 has contributed to nothing yet."""
  for round_ in (0, 1):
    run.contribute(0, round_)
  told = [
    [message.round for message, _ in run.sent_to(m, msg.RoundOpened)]
    for m in (0, 1)
  ]
  assert told[0] == [0]
  assert told[1] == [0, 1]


def test_nobody_speaks_for_a_learner_but_its_own_connection(run):
  contribution = msg.Contribution(1, 2, 0, 0, 0, 1, 100, 1, 100, 1.0)
  parcel = Parcel(contribution, SOUND, True, 13)
  run.endpoint.on_parcel(run.peers[0], parcel)
  before = len(run.tape)
  run.step()
  assert len(run.tape) == before
  run.endpoint.on_parcel(99, Parcel(msg.RoundOpened(1, 1), b'', True, 5))
  run.step()
  assert len(run.tape) == before


def test_closed_while_it_serves_it_still_ends():
  # Somebody closes the endpoint first; merges and the save still come back.
  run = Run(M=1)
  with concurrent.futures.ThreadPoolExecutor(2) as threadpool:
    run.server._executor = run.server._saver = threadpool
    served = threadpool.submit(run.server.serve)
    while not run.server._is_serving:
      assert not served.done()
    run.server.close(0.0)
    run.server.request_stop('enough')
    assert served.result(DEADLINE_SECONDS) == fx.Finish('enough')
