"""One machine alone, told by the test what happens."""

from typing import Any

from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.learner import learner_machine
from decoupled_diloco.protocol.learner_state import LearnerOptions
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.protocol.syncer import syncer_machine
from tests.protocol.accounts import Accounts, Tape
from tests.protocol.cluster_parts import TOKENS_PER_STEP, syncer_options

Effects = tuple[fx.Effect, ...]
SOUND = ev.PayloadFacts(8, norm=1.0)


def messages(effects: Effects) -> list[msg.Message]:
  """What is sent or broadcast, in order."""
  return [
    effect.message
    for effect in effects
    if isinstance(effect, fx.Send | fx.Broadcast)
  ]


def reasons(effects: Effects) -> list[msg.Reason]:
  """Why contributions are refused."""
  return [m.reason for m in messages(effects) if isinstance(m, msg.Refusal)]


class SyncerScript(Accounts):
  """A syncer without learners: the test speaks for them.

  Args:
    joined: learners that have said hello and are ready.
    overrides: as in `syncer_options`.
  """

  def __init__(self, joined: int = 0, **overrides: Any):
    self.options = syncer_options(**overrides)
    self.machine = syncer_machine(self.options)
    self.state = self.machine.init()
    self.now = 0.0
    self.tape: Tape = []
    self.incarnations: dict[int, int] = {}
    for m in range(joined):
      self.join(m)

  def tell(self, event: ev.Event) -> Effects:
    """Steps the machine."""
    self.now = event.now
    self.state, effects = self.machine.step(self.state, event)
    self.tape.append((event, effects))
    return effects

  def say(
    self, message: msg.Message, payload: ev.PayloadFacts | None = None
  ) -> Effects:
    """A message arrives."""
    return self.tell(ev.MessageArrived(self.now, message, payload))

  def hello(self, m: int, **fields: Any) -> Effects:
    """A learner says hello, and takes the incarnation of the welcome."""
    layout = fields.pop('layout', self.options.layout)
    effects = self.say(msg.Hello(m, layout, **fields))
    for message in messages(effects):
      if isinstance(message, msg.Welcome):
        self.incarnations[m] = message.incarnation
    return effects

  def join(self, m: int, **fields: Any) -> Effects:
    """A learner says hello and is ready."""
    self.hello(m, **fields)
    return self.say(msg.Ready(m, self.incarnations[m]))

  def lose(self, m: int) -> Effects:
    """A learner's connection breaks."""
    return self.tell(
      ev.ConnectionLost(self.now, m, self.incarnations[m], 'cut')
    )

  def contribution(self, m: int, round_: int, **fields: Any):
    """A contribution of one step, from the newest version."""
    fragment = self.options.schedule.fragment_of(round_)
    values: dict[str, Any] = {
      'incarnation': self.incarnations.get(m, 0),
      'fragment': fragment,
      'base_version': self.state.versions[fragment],
      'steps': 1,
      'tokens': TOKENS_PER_STEP,
      'total_steps': 1,
      'total_tokens': TOKENS_PER_STEP,
      'step_seconds': 1.0,
    }
    return msg.Contribution(learner=m, round=round_, **(values | fields))

  def contribute(
    self,
    m: int,
    round_: int,
    payload: ev.PayloadFacts | None = SOUND,
    **fields: Any,
  ) -> Effects:
    """A contribution arrives."""
    return self.say(self.contribution(m, round_, **fields), payload)

  def done(self, round_: int) -> Effects:
    """The shell has merged a round."""
    return self.tell(ev.MergeDone(self.now, round_, 8, 1.0))

  def saved(self, error: str = '') -> Effects:
    """The shell has saved what is final, or could not."""
    return self.tell(ev.Saved(self.now, error))

  def wait(self, seconds: float) -> Effects:
    """Time passes."""
    return self.tell(ev.TimePassed(self.now + seconds))


class LearnerScript:
  """A learner without a syncer: the test speaks for it.

  Args:
    P: fragments.
    K: steps of a scan.
    limit, mode: of the lead.
    keeps_progress: as in `LearnerOptions`.
    has_begun: it was welcomed, holds version 0 of all, and round 0 is open.
  """

  def __init__(
    self,
    P: int = 4,
    K: int = 1,
    limit: int = 2,
    mode: str = 'train',
    keeps_progress: bool = False,
    has_begun: bool = True,
  ):
    self.machine = learner_machine(
      LearnerOptions(0, ScheduleOptions(K * P, P), limit, mode, keeps_progress)
    )
    self.state = self.machine.init()
    self.now = 0.0
    self.P, self.K = P, K
    if has_begun:
      self.tell(ev.Compiled(0.0))
      self.welcome(round=-1)
      self.begin()

  def tell(self, event: ev.Event) -> Effects:
    """Steps the machine."""
    self.now = event.now
    self.state, effects = self.machine.step(self.state, event)
    return effects

  def hear(self, message: msg.Message) -> Effects:
    """A message of the syncer arrives."""
    return self.tell(ev.MessageArrived(self.now, message))

  def welcome(self, **fields: Any) -> Effects:
    """The syncer admits the learner, under the next incarnation."""
    values: dict[str, Any] = {
      'incarnation': self.state.incarnation + 1,
      'run_id': 'run',
      'round': self.state.newest_round,
      'last_round': -1,
      'versions': (0,) * self.P,
      'merged_rounds': (-1,) * self.P,
    } | fields
    flights = [ledger.flight for ledger in self.state.ledgers if ledger.flight]
    # Unless it says otherwise, the syncer holds what has come until then.
    values.setdefault(
      'held_rounds',
      tuple(f.round for f in flights if f.round <= values['last_round']),
    )
    return self.hear(msg.Welcome(learner=0, **values))

  def begin(self) -> None:
    """Version 0 of all fragments arrives, and round 0 is open."""
    for p in range(self.P):
      self.hear(msg.Publication(-1, p, 0, (), 'value'))
    self.open(0)

  def open(self, round_: int) -> Effects:
    """The syncer's current round is this one."""
    return self.hear(msg.RoundOpened(round_, round_ % self.P))

  def scan(self) -> Effects:
    """A scan ends."""
    self.now += 1.0
    tokens = self.K * TOKENS_PER_STEP
    return self.tell(ev.ScanEnded(self.now, self.K, tokens, 1.0))

  def lose(self) -> Effects:
    """The connection breaks."""
    return self.tell(
      ev.ConnectionLost(self.now, 0, self.state.incarnation, 'cut')
    )

  def publish(
    self, round_: int, version: int, contributors: tuple[int, ...] = (0,)
  ) -> Effects:
    """A merged round arrives."""
    return self.hear(
      msg.Publication(round_, round_ % self.P, version, contributors, 'update')
    )

  def refuse(self, round_: int, reason: msg.Reason) -> Effects:
    """A hand-over is refused."""
    return self.hear(
      msg.Refusal(
        0, self.state.incarnation, round_, round_ % self.P, reason, 'why'
      )
    )


def handed_over(effects: Effects) -> list[msg.Contribution]:
  """The contributions that a learner hands over."""
  return [e.contribution for e in effects if isinstance(e, fx.HandOver)]
