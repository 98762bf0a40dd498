"""Stand-ins for a learner's arrays and for its link, which note what is asked.

A machine between the two, and messages of a syncer to it.
"""

import collections

from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.learner_state import LearnerOptions
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.runtime.local_model import Staging
from decoupled_diloco.runtime.shared_machine import SharedMachine
from decoupled_diloco.transport.base import Parcel

# Of one fragment, and scans of two steps.
OPTIONS = LearnerOptions(
  learner=0,
  schedule=ScheduleOptions(sync_every=2, num_fragments=1),
  max_rounds_in_flight=4,
  on_lead_limit='train',
  keeps_progress=False,
)
WELCOME = msg.Welcome(
  learner=0,
  incarnation=1,
  run_id='run',
  round=0,
  last_round=-1,
  versions=(0,),
  merged_rounds=(-1,),
  total_steps=0,
  total_tokens=0,
)
VALUE = msg.Publication(-1, 0, 0, (), 'value')


class NoArrays:
  """Stages what it is told to, and keeps what it is asked."""

  def __init__(self, staging: Staging = Staging.STAGED):
    self.staging = staging
    self.calls = []

  def stage(self, fragment, version, form, payload):
    self.calls.append(('stage', fragment, version, form, payload))
    return self.staging

  def claim(self, fragment, version):
    self.calls.append(('claim', fragment, version))

  def drop_older(self, fragment, version):
    self.calls.append(('drop_older', fragment, version))


class ScriptedLink:
  """Receives what a test gives it, and keeps what is sent.

  Attributes:
    coming: events still to be received; between them nothing comes.
    on_empty: called when nothing is left to be received.
  """

  def __init__(self, *coming, on_empty=lambda: None):
    self.coming = collections.deque(coming)
    self.on_empty = on_empty
    self.sent = []

  def send(self, message, payload=b''):
    self.sent.append(message)
    return ()

  def receive(self, timeout_seconds):
    if not self.coming:
      self.on_empty()
      return None
    return self.coming.popleft()


def make_machine(model, link, record=lambda event, effects: None):
  return SharedMachine(OPTIONS, model=model, link=link, record=record)


def parcel(message, *, payload=b'bytes', is_intact=True):
  return Parcel(message, payload, is_intact, wire_bytes=100)
