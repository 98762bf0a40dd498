"""What must be true of every run, read off its syncer's tape.

However often syncer and learners were killed: the machine decides again as it
did, nothing that was published in one life of the syncer is missing in the
next, and no token is merged twice.
"""

import collections
from typing import NamedTuple

from decoupled_diloco.observe.tape import Segment, Tape
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.replaying import machine_of, replay_tape


class Audit(NamedTuple):
  """What was found.

  Attributes:
    num_events: on the tape.
    num_lives: of the syncer.
    num_merges: that were published or are durable.
    problems: sentences; none if everything is as it must be.
  """

  num_events: int
  num_lives: int
  num_merges: int
  problems: tuple[str, ...]


def audit(tape: Tape) -> Audit:
  """Audits the tape of a syncer.

  Raises:
    ValueError: if it is the tape of a learner.
  """
  if tape.segments[0].header.machine != 'syncer':
    raise ValueError('only the tape of a syncer can be audited.')
  problems = []
  try:
    replay_tape(tape)
  except ValueError as error:
    problems.append(f'The tape does not replay: {error}')
  versions = _Versions()
  tokens = _Tokens()
  for number, segment in enumerate(tape.segments):
    if number:
      versions.restart(number, segment)
    for event, effects in segment.steps:
      versions.take(effects)
      tokens.take(event, effects)
  return Audit(
    num_events=len(tape.steps),
    num_lives=len(tape.segments),
    num_merges=sum(versions.published.values()),
    problems=(*problems, *versions.problems, *tokens.problems),
  )


class _Versions:
  """Versions go up by one, through all lives of the syncer."""

  def __init__(self):
    self.published: collections.Counter[int] = collections.Counter()
    self.problems: list[str] = []

  def restart(self, number: int, segment: Segment) -> None:
    """A new life begins with what was durable."""
    event = segment.steps[0][0] if segment.steps else None
    if not isinstance(event, ev.Restarted):
      if segment.steps:
        self.problems.append(
          f'Life {number + 1} of the syncer does not begin with what it has '
          'restored.'
        )
      return
    machine = machine_of(segment.header)
    state, _ = machine.step(machine.init(), event)
    for fragment, version in enumerate(state.versions):
      # The last merge may have become durable without being published.
      if version - self.published[fragment] not in (0, 1):
        self.problems.append(
          f'Life {number + 1} of the syncer begins with version {version} of '
          f'fragment {fragment}, of which {self.published[fragment]} was '
          'published.'
        )
      self.published[fragment] = version

  def take(self, effects: tuple[fx.Effect, ...]) -> None:
    for effect in effects:
      if isinstance(effect, fx.Publish):
        before = self.published[effect.fragment]
        if effect.version != before + 1:
          self.problems.append(
            f'Fragment {effect.fragment} has version {effect.version} after '
            f'{before}.'
          )
        self.published[effect.fragment] = effect.version


class _Tokens:
  """Of each learner and fragment, what is merged does not overlap."""

  def __init__(self):
    self.problems: list[str] = []
    self._accepted: dict[tuple[int, int], msg.Contribution] = {}
    self._merging: dict[int, list[msg.Contribution]] = {}
    self._ends: dict[tuple[int, int], int] = {}

  def take(self, event: ev.Event, effects: tuple[fx.Effect, ...]) -> None:
    match event:
      case ev.MergeDone(round=round_):
        self._merged(round_)
      case ev.Restarted(merged=durable):
        for round_ in durable:
          self._merged(round_)
        self._merging.clear()
        self._accepted.clear()
    for effect in effects:
      match effect:
        case fx.Accept(learner=learner, round=round_):
          assert isinstance(event, ev.MessageArrived)
          assert isinstance(event.message, msg.Contribution)
          self._accepted[learner, round_] = event.message
        case fx.Discard(learner=learner, round=round_):
          self._accepted.pop((learner, round_), None)
        case fx.Merge(round=round_, shares=shares):
          found = [
            self._accepted.pop((share.learner, round_), None)
            for share in shares
          ]
          if None in found:
            self.problems.append(
              f'Round {round_} merges what was not accepted.'
            )
          self._merging[round_] = [entry for entry in found if entry]

  def _merged(self, round_: int) -> None:
    for entry in self._merging.pop(round_, []):
      key = entry.learner, entry.fragment
      start = entry.total_tokens - entry.tokens
      if start < self._ends.get(key, 0):
        self.problems.append(
          f'Round {round_} merges tokens of learner {entry.learner} from '
          f'{start:,} on, of which fragment {entry.fragment} had them up to '
          f'{self._ends[key]:,}.'
        )
      self._ends[key] = entry.total_tokens
