"""What a learner makes of what comes, without any thread."""

import itertools
from typing import Any

import pytest

from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.runtime.learner_receiver import (
  LearnerReceiver,
  SyncerUnreachableError,
)
from decoupled_diloco.runtime.local_model import Staging
from decoupled_diloco.transport.base import LinkDown, LinkUp
from tests.runtime.learner_stand_ins import (
  VALUE,
  WELCOME,
  NoArrays,
  ScriptedLink,
  make_machine,
  parcel,
)

UPDATE = msg.Publication(0, 0, 1, (0,), 'update')


class Receiving:
  """A receiver that has got these events, one a second.

  Attributes:
    told: what people were told.
  """

  def __init__(self, *coming, staging=Staging.STAGED, connect_seconds=30.0):
    self.model: Any = NoArrays(staging)
    self.link: Any = ScriptedLink(*coming)
    self.told: list[str] = []
    self.machine = make_machine(self.model, self.link)
    self.link.on_empty = self.machine.is_over.set
    seconds = itertools.count()
    self.receiver = LearnerReceiver(
      0,
      layout='layout',
      machine=self.machine,
      model=self.model,
      link=self.link,
      connect_seconds=connect_seconds,
      tell_people=self.told.append,
      clock=lambda: float(next(seconds)),
    )

  def run(self):
    self.receiver.run()
    return self


def test_it_says_who_it_is_on_every_connection():
  run = Receiving(
    LinkUp(), parcel(WELCOME), parcel(VALUE), LinkDown('cut'), LinkUp()
  ).run()
  first, second = run.link.sent
  assert first == msg.Hello(0, 'layout', '', 0, (-1,))
  assert second == msg.Hello(0, 'layout', 'run', 1, (0,))
  assert run.told == ['lost the syncer (cut); trains on']
  assert not run.machine.state.is_connected


def test_a_publication_is_decoded_before_the_machine_hears_of_it():
  run = Receiving(LinkUp(), parcel(WELCOME), parcel(VALUE)).run()
  assert run.model.calls == [
    ('stage', 0, 0, 'value', b'bytes'),
    ('drop_older', 0, 0),
  ]
  assert run.machine.state.versions == (0,)


@pytest.mark.parametrize('is_intact', [True, False])
def test_what_cannot_be_decoded_is_asked_for_as_a_value(is_intact):
  """An update of a version that is not here, or one that was damaged."""
  staging = Staging.GAP if is_intact else Staging.STAGED
  run = Receiving(
    LinkUp(),
    parcel(WELCOME),
    parcel(UPDATE, is_intact=is_intact),
    staging=staging,
  ).run()
  assert run.link.sent[1:] == [msg.Lacking(0, 1, (0,))]
  assert len(run.model.calls) == is_intact
  assert run.machine.state.versions == (-1,)


def test_nobody_there():
  """It is told that the link is down, again and again, and gives up."""
  run = Receiving(*[LinkDown('refused')] * 100, connect_seconds=5.0)
  with pytest.raises(SyncerUnreachableError, match=r'syncer\.address'):
    run.run()
  assert 90 < len(run.link.coming) < 100
  assert run.told == []


def test_once_connected_it_never_gives_up():
  run = Receiving(
    LinkUp(), *[LinkDown('refused')] * 100, connect_seconds=5.0
  ).run()
  assert not run.link.coming
