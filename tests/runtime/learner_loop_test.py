"""How a learner begins and ends, without any arrays."""

import threading

import jax
import pytest

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.runtime.learner_loop import LearnerLoop
from decoupled_diloco.runtime.learner_receiver import SyncerUnreachableError
from decoupled_diloco.runtime.local_model import Staging
from decoupled_diloco.transport.memory import MemoryNetwork
from decoupled_diloco.transport.options import TransportOptions
from tests.runtime.learner_stand_ins import OPTIONS, VALUE, WELCOME

DEADLINE_SECONDS = 30


class Model:
  """Stands for the arrays; notes what is asked of it."""

  def __init__(self, compiling=lambda: None, loss=1.0):
    self.calls = []
    self._compiling = compiling
    self._loss = loss

  def compile(self, example):
    self.calls.append('compile')
    self._compiling()

  def stage(self, fragment, version, form, payload):
    return Staging.STAGED

  def claim(self, fragment, version):
    pass

  def drop_older(self, fragment, version):
    pass

  def begin(self, versions, rng, rejoin_step):
    self.calls.append('begin')

  def train(self, batches, global_step):
    self.calls.append('train')
    return {'loss': self._loss}


class Syncer:
  """Answers a hello as it is told to, and keeps what else it hears."""

  def __init__(self, network, *answers):
    self.heard = []
    self.hellos = threading.Semaphore(0)
    self._answers = answers
    self._endpoint = network.endpoint()
    self._endpoint.start(self._take, lambda peer, reason: None)

  def _take(self, peer, parcel):
    self.heard.append(parcel.message)
    if isinstance(parcel.message, msg.Hello):
      for message, payload in self._answers:
        self._endpoint.send(peer, message, payload)
      self.hellos.release()


@pytest.fixture
def network():
  return MemoryNetwork(TransportOptions(), is_automatic=True)


def make_loop(network, model, *, link=None, told=None, connect_seconds=30.0):
  return LearnerLoop(
    OPTIONS,
    layout='layout',
    model=model,
    link=network.link() if link is None else link,
    open_batches=lambda position: iter(range(1000)),
    tokens_per_step=1,
    rng=jax.random.key(0),
    heartbeat_seconds=0.01,
    connect_seconds=connect_seconds,
    tell=(lambda text: None) if told is None else told.append,
  )


REJECTION = (msg.Rejection(0, 'another model'), b'')


def test_a_refused_learner_does_not_compile(network):
  Syncer(network, REJECTION)
  model = Model()
  end = make_loop(network, model).run(None)
  assert end == fx.Finish('another model', is_failure=True)
  assert model.calls == []


def test_a_learner_refused_while_it_compiles_is_silent_from_then_on(network):
  """It does not say hello again, nor that it has lost the syncer."""
  link = network.link()

  def compiling():
    syncer = Syncer(network, REJECTION)
    network.deliver()
    assert syncer.hellos.acquire(timeout=DEADLINE_SECONDS)
    network.sever(link)
    assert not syncer.hellos.acquire(timeout=0.2)

  model, told = Model(compiling), []
  end = make_loop(network, model, link=link, told=told).run(None)
  assert end.is_failure
  assert model.calls == ['compile']
  assert told == []


def test_nobody_there(network):
  model = Model()
  with pytest.raises(SyncerUnreachableError, match=r'syncer\.address'):
    make_loop(network, model, connect_seconds=0.1).run(None)
  assert model.calls == []


@pytest.mark.parametrize('loss', [float('nan'), float('inf')])
def test_a_loss_that_is_not_finite_ends_the_learner(network, loss):
  Syncer(network, (WELCOME, b''), (VALUE, b'x'))
  model = Model(loss=loss)
  with pytest.raises(FloatingPointError, match=r'inner\.learning_rate'):
    make_loop(network, model).run(None)
  assert model.calls == ['compile', 'begin', 'train']


def test_an_error_on_any_thread_ends_the_learner(network):
  class Broken(Model):
    def stage(self, fragment, version, form, payload):
      raise ValueError('a payload of another length')

  Syncer(network, (WELCOME, b''), (VALUE, b'x'))
  with pytest.raises(ValueError, match='another length'):
    make_loop(network, Broken()).run(None)


def test_a_stop_before_anything_else(network):
  """Somebody stops it while it looks for its syncer."""
  loop = make_loop(network, Model())
  loop.request_stop('enough')
  assert loop.run(None).reason == 'enough'
