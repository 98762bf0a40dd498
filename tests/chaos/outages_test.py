"""Outages are what was injected, and what the tape has of it."""

import pytest

from decoupled_diloco.chaos.injector import Struck
from decoupled_diloco.chaos.outages import (
  Outage,
  availability,
  median_seconds,
  outages,
)
from decoupled_diloco.chaos.schedule import Fault
from decoupled_diloco.observe.tape import Segment, Tape, TapeHeader
from decoupled_diloco.protocol import effects as fx
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg


def tape(*steps):
  header = TapeHeader('syncer', {}, (1,), {'began_at': 1e9})
  return Tape((Segment(header, steps),), None)


def lost(now, learner):
  return ev.ConnectionLost(now, learner, 1, 'gone'), ()


def silent(now, learner):
  effect = fx.Disconnect(learner, 1, 'not heard of for 5 s')
  return ev.TimePassed(now), (effect,)


def ready(now, learner):
  return ev.MessageArrived(now, msg.Ready(learner, 2)), ()


def struck(at, kind, *learners, seconds=0.0):
  """Injected so many seconds after training has begun, at 5 s of the tape."""
  fault = Fault(at, kind, learners, seconds)
  pids = tuple(100 + m for m in learners)
  return Struck(fault, 1e9 + 5.0 + at, learners, pids)


def rounded(found):
  """Unix times are only so exact."""

  def near(at):
    return None if at is None else round(at, 3)

  return [
    outage._replace(
      began_at=near(outage.began_at),
      detected_at=near(outage.detected_at),
      ended_at=near(outage.ended_at),
    )
    for outage in found
  ]


def test_a_killed_learner_is_away_until_it_is_ready():
  found = outages(
    tape(
      ready(4.0, 0),
      ready(4.0, 1),
      lost(15.2, 0),
      lost(16.0, 1),
      ready(21.0, 0),
    ),
    [struck(10.0, 'kill', 0), struck(10.5, 'site', 1)],
    opened_at=5.0,
  )
  assert rounded(found) == [
    Outage(0, 'kill', 10.0, 10.2, 16.0),
    # It never came back.
    Outage(1, 'site', 10.5, 11.0, None),
  ]


def test_a_frozen_learner_is_away_until_it_is_not():
  found = outages(
    tape(silent(18.0, 0), lost(40.0, 1)),
    [
      struck(10.0, 'freeze', 0, seconds=6.0),
      struck(11.0, 'freeze', 1, seconds=2.0),
      struck(12.0, 'partition', 2, seconds=9.0),
      struck(13.0, 'corrupt', 2),
    ],
    opened_at=5.0,
  )
  assert rounded(found) == [
    Outage(0, 'freeze', 10.0, 13.0, 16.0),
    # What was lost half a minute later was lost for another reason.
    Outage(1, 'freeze', 11.0, None, 13.0),
  ]


def test_availability():
  found = [
    Outage(0, 'kill', 10.0, None, 20.0),
    Outage(0, 'kill', 15.0, None, 25.0),  # Overlaps: 15 s in all.
    Outage(1, 'kill', 18.0, None, 28.0),
    Outage(1, 'kill', 95.0, None, None),  # Until the end: 5 s.
  ]
  share, uptime = availability(found, 2, 1, 100.0)
  assert share == pytest.approx(1 - 30 / 200)
  # Both are away from 18 to 25 s.
  assert uptime == pytest.approx(0.93)
  _, both = availability(found, 2, 2, 100.0)
  # From 10 to 28 s, and from 95 to 100 s, not both are there.
  assert both == pytest.approx(1 - 0.23)
  assert availability([], 2, 1, 100.0) == (1.0, 1.0)


def test_medians():
  assert median_seconds([3.0, None, 1.0, 2.0]) == 2.0
  assert median_seconds([None]) is None
