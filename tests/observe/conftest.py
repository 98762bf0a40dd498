"""Two kinds of tapes: one made by hand, and those of the real machines."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import pytest

from decoupled_diloco.observe.tape_lines import Step, TapeHeader
from decoupled_diloco.protocol import messages as m
from decoupled_diloco.protocol.effects import (
  Accept,
  Broadcast,
  Effect,
  Finish,
  GraceBegan,
  Merge,
  Notice,
  Publish,
  Send,
  SendFragments,
  Share,
)
from decoupled_diloco.protocol.events import (
  ConnectionLost,
  Event,
  MergeDone,
  MessageArrived,
  PayloadFacts,
  TimePassed,
)
from decoupled_diloco.protocol.grace import GraceOptions
from decoupled_diloco.protocol.membership import MembershipOptions
from decoupled_diloco.protocol.syncer_state import (
  BudgetOptions,
  SyncerOptions,
  SyncerState,
)
from tests.protocol.cluster import TOKENS_PER_STEP, Cluster, syncer_options

STEPS_PER_SCAN = 2
# The cluster's payloads have 8 bytes, so that they are 4 bits for an element.
FRAGMENT_SIZE = 16


class Run(NamedTuple):
  """A run of the real machines.

  Attributes:
    steps: the syncer's events, each with its effects.
    state: of the syncer at the end.
    trained_tokens: by learner, all that it has trained, even if it was lost.
  """

  options: SyncerOptions
  header: TapeHeader
  steps: list[Step]
  state: SyncerState
  trained_tokens: dict[int, int]


@pytest.fixture
def tiny_run() -> Callable[..., Run]:
  """Runs the real machines on a scripted clock; see `_run`."""
  return _run


def _run(
  scan_seconds: tuple[float, ...] = (1.0, 1.0),
  num_fragments: int = 2,
  min_learners: int = 1,
  rounds: int = 10,
  latency: float = 0.05,
  faults: tuple[tuple[float, int, float, bool], ...] = (),
  keeps_progress: bool = False,
) -> Run:
  """One run.

  Args:
    scan_seconds: of every learner; their number is M.
    num_fragments: P.
    min_learners: K_min.
    rounds: the budget.
    latency: of every message, one way, in seconds.
    faults: (time, learner, seconds until it is back, whether it is killed).
      One that is not killed is cut off, and the syncer is not told.
    keeps_progress: of the learners.
  """
  options = syncer_options(
    M=len(scan_seconds),
    k_min=min_learners,
    H=num_fragments * STEPS_PER_SCAN,
    P=num_fragments,
    membership=MembershipOptions(
      num_learners=len(scan_seconds),
      heartbeat_seconds=0.5,
      liveness_timeout_seconds=3.0,
      start_timeout_seconds=20.0,
    ),
    grace=GraceOptions(cap_seconds=0.5),
    budget=BudgetOptions(rounds=rounds, drain_seconds=5.0),
  )
  cluster = Cluster(
    options,
    [lambda seconds=seconds: seconds for seconds in scan_seconds],
    latency=latency,
    merge_seconds=0.01,
    keeps_progress=keeps_progress,
    heartbeats=True,
  )
  for time, learner, away, is_killed in faults:
    if is_killed:
      cluster.at(time, lambda n=learner: cluster.kill(n))
      cluster.at(time + away, lambda n=learner: cluster.start(n))
    else:
      cluster.at(time, lambda n=learner: cluster.partition(n, False))
      cluster.at(time + away, lambda n=learner: cluster.heal(n))
  cluster.run(until=1000.0)
  return Run(
    options,
    TapeHeader.of('syncer', options, (FRAGMENT_SIZE,) * num_fragments),
    [
      (_with_figures(event, scan_seconds), effects)
      for event, effects in cluster.tape
    ],
    cluster.syncer_state,
    {
      number: learner.figures.scans * STEPS_PER_SCAN * TOKENS_PER_STEP
      for number, learner in enumerate(cluster.learners)
    },
  )


def _with_figures(event: Event, scan_seconds: tuple[float, ...]) -> Event:
  """Gives heartbeats the figures on which no decision depends."""
  if not isinstance(event, MessageArrived):
    return event
  beat = event.message
  if not isinstance(beat, m.Heartbeat) or not beat.total_steps:
    return event
  rate = STEPS_PER_SCAN * TOKENS_PER_STEP / scan_seconds[beat.learner]
  beat = dataclasses.replace(beat, tokens_per_second=rate, loss=3.0)
  return dataclasses.replace(event, message=beat)


HAND_MADE_HEADER = TapeHeader(
  'syncer',
  {
    'run_id': 'by-hand',
    'schedule': {'sync_every': 4, 'num_fragments': 2},
    'membership': {'num_learners': 2},
    'quorum': {'min_learners': 1},
    'budget': {'rounds': 100, 'merged_tokens': 0},
  },
  (100, 50),
  {'fragment_value_bytes': [400, 200]},
)


def _arrived(now, message, num_bytes=None):
  payload = None if num_bytes is None else PayloadFacts(num_bytes)
  return MessageArrived(now, message, payload)


def _welcomed(now, learner, incarnation, total_tokens=0):
  hello = m.Hello(learner, 'layout')
  welcome = m.Welcome(
    learner=learner,
    incarnation=incarnation,
    run_id='by-hand',
    round=-1,
    last_round=-1,
    versions=(0, 0),
    merged_rounds=(-1, -1),
    total_tokens=total_tokens,
  )
  effects = (Send(learner, welcome), SendFragments(learner, (0, 1)))
  return _arrived(now, hello), effects


@pytest.fixture
def hand_made() -> tuple[TapeHeader, list[Step]]:
  """A short tape that one can work out on paper. Two learners, two fragments.

  Learner 1 is lost at 10 and back at 13. At 14 it is refused once.
  """

  def beat(now, learner, incarnation, tokens, rate, activity='training'):
    message = m.Heartbeat(
      learner, incarnation, activity, tokens // 10, tokens, rate, 2.5
    )
    return _arrived(now, message), ()

  def hand_over(now, learner, incarnation, round_, tokens, total, num_bytes):
    entry = m.Contribution(
      learner, incarnation, round_, round_ % 2, 0, 2, tokens, 2, total, 0.5
    )
    return _arrived(now, entry, num_bytes)

  opened = Broadcast(m.RoundOpened(0, 0))
  refusal = m.Refusal(1, 3, 2, 0, m.Reason.STALE, 'too old')
  merge_0: tuple[Effect, ...] = (
    Accept(1, 0),
    GraceBegan(0, 0, 1.0, 0.5, 'by hand'),
    Broadcast(m.RoundOpened(1, 1)),
    Merge(0, 0, 1, (Share(0, 3.0), Share(1, 1.0))),
  )
  steps = [
    _welcomed(0.0, 0, 1),
    _welcomed(1.0, 1, 2),
    (_arrived(2.0, m.Ready(0, 1)), ()),
    (_arrived(3.0, m.Ready(1, 2)), (opened,)),
    beat(4.0, 0, 1, 0, 10.0),
    (hand_over(5.0, 0, 1, 0, 20, 20, 50), (Accept(0, 0),)),
    (hand_over(6.0, 1, 2, 0, 10, 10, 50), merge_0),
    (MergeDone(7.0, 0, 200, 1.0), (Publish(0, 0, 1, (0, 1), (0, 1)),)),
    (hand_over(8.0, 0, 1, 1, 40, 40, 25), (Accept(0, 1),)),
    beat(9.0, 1, 2, 25, 5.0),
    (
      ConnectionLost(10.0, 1, 2, 'reset'),
      (Merge(1, 1, 1, (Share(0, 8.0),)),),
    ),
    (MergeDone(10.5, 1, 100, 1.0), (Publish(1, 1, 1, (0,), (0,)),)),
    _welcomed(13.0, 1, 3, 25),
    (hand_over(14.0, 1, 3, 2, 5, 30, 50), (Send(1, refusal),)),
    (
      TimePassed(15.0),
      (Broadcast(m.DrainStarted(2, 5.0)), Notice('Draining: by hand.')),
    ),
    (TimePassed(17.0), (Broadcast(m.RunEnded('by hand')), Finish('by hand'))),
  ]
  return HAND_MADE_HEADER, steps
