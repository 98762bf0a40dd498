"""The status of a run, folded from a tape."""

import dataclasses

import pytest

from decoupled_diloco.observe.status import (
  catch_up,
  fold,
  init,
  resume,
  update,
)
from decoupled_diloco.observe.tape import (
  Segment,
  Tape,
  TapeHeader,
  TapeWriter,
  follow,
)
from decoupled_diloco.protocol import messages as m
from decoupled_diloco.protocol.effects import Broadcast, Disconnect, Send
from decoupled_diloco.protocol.events import (
  ConnectionLost,
  MessageArrived,
  PayloadFacts,
  Restarted,
  TimePassed,
)


def _status(hand_made, until=float('inf')):
  """The status of the hand-made tape (see conftest) at a time."""
  header, steps = hand_made
  status = init(header)
  for event, effects in steps:
    if event.now <= until:
      update(status, event, effects)
  return status


def test_the_run_by_hand(hand_made):
  status = _status(hand_made, until=13.0)
  assert (status.run_id, status.num_fragments) == ('by-hand', 2)
  assert (status.phase, status.current_round) == ('running', 1)
  # First event at 0, round 0 opened at 3.
  assert status.startup_seconds == 3.0
  assert status.elapsed_seconds == status.wall_seconds == 10.0
  assert status.rounds_merged == 2
  # Round 0: (20 + 10) / 2 fragments; round 1: 40 / 2.
  assert status.merged_tokens == 15 + 20
  assert status.contributors == (0,)
  assert (status.quorum_seconds.last, status.quorum_seconds.median) == (1, 1)
  assert (status.grace_seconds.last, status.grace_seconds.median) == (0.5, 0.5)
  # Two payloads of 50 bytes for 100 elements, one of 25 bytes for 50.
  assert status.bytes_up == 125
  assert status.bits_up == 8 * 125 / (100 + 100 + 50) == 4.0
  # Publications: 200 bytes for 100 elements, 100 bytes for 50.
  assert status.bits_down == 8 * 300 / 150 == 16.0
  # To learner 0: both publications; to learner 1: the first. And three
  # admissions with both values, 600 bytes each.
  assert status.bytes_down == (200 + 100) + 200 + 3 * 600
  assert status.learners[0].bytes_down == 300 + 600
  assert status.learners[1].bytes_down == 200 + 2 * 600
  # Nobody has sent a receipt, and learner 1 was lost before the second.
  assert status.publications_in_flight == 2
  assert status.receipts_due[0].learners == {0}
  assert status.receipts_due[1].learners == {0}


def test_the_learners_by_hand(hand_made):
  status = _status(hand_made, until=13.0)
  zero, one = status.learners.values()
  assert (zero.state, zero.incarnation, zero.restarts) == ('training', 1, 0)
  assert (one.state, one.incarnation, one.restarts) == ('joining', 3, 1)
  assert (zero.loss, zero.tokens_per_second) == (2.5, 10.0)
  # In at 0, two rounds merged since, both with it.
  assert zero.participation == zero.participation_since_return == 1.0
  # In at 1, merged in one of two; since its return no round was merged.
  assert one.participation == 0.5
  assert one.participation_since_return is None
  # Weights 3 : 1 in round 0, all in round 1.
  assert status.weight_share(0) == (3 / 4 + 1) / 2
  assert status.weight_share(1) == (1 / 4 + 0) / 2
  assert (zero.merged_tokens, one.merged_tokens) == (20 / 2 + 40 / 2, 10 / 2)
  # Both fragments were at version 0 when round 0 and 1 were merged into them.
  assert (zero.staleness.last, zero.staleness_mean) == (0, 0.0)
  assert (zero.last_seen, one.last_seen) == (8.0, 13.0)
  assert (zero.processed_tokens, one.processed_tokens) == (40, 25)


def test_faults_are_losses_that_were_survived(hand_made):
  assert _status(hand_made, until=12.0).faults == []
  assert _status(hand_made, until=12.0).learners[1].state == 'absent'
  (fault,) = _status(hand_made).faults
  # Last heard of at 9, admitted again at 13.
  assert (fault.at, fault.learner, fault.seconds_away) == (13.0, 1, 4.0)
  assert (fault.reason, fault.is_new_process) == ('reset', True)


def test_the_end_by_hand(hand_made):
  status = _status(hand_made)
  assert status.refusals == {'stale': 1}
  assert status.learners[1].refusals == {'stale': 1}
  assert (status.phase, status.end_reason) == ('finished', 'by hand')
  # Round 0 at 3, drain at 15, end at 17.
  assert (status.wall_seconds, status.drain_seconds) == (12.0, 2.0)
  assert status.elapsed_seconds == 14.0
  assert {learner.state for learner in status.learners.values()} == {'done'}
  assert [(h.kind, h.text) for h in status.happenings] == [
    ('joined', 'Learner 0 has joined.'),
    ('joined', 'Learner 1 has joined.'),
    ('started', 'Round 0 is open: training begins with 2 of 2 learners.'),
    ('lost', 'Learner 1 is lost: reset.'),
    ('back', 'Learner 1 is back after 4.0 s, as a new process.'),
    ('notice', 'Draining: by hand.'),
    ('finished', 'Finished: by hand.'),
  ]


def test_who_is_gone_after_the_end_is_no_loss(hand_made):
  status = _status(hand_made)
  update(status, ConnectionLost(18.0, 0, 1, 'closed'), ())
  assert status.learners[0].state == 'done'
  assert status.happenings[-1].kind == 'finished'


def test_a_silent_learner_is_lost_once(hand_made):
  status = _status(hand_made, until=9.0)
  silent = Disconnect(1, 2, 'silent for 10.0 s')
  update(status, TimePassed(19.0), (silent,))
  update(status, ConnectionLost(19.1, 1, 2, 'closed'), ())
  assert [h.text for h in status.happenings if h.kind == 'lost'] == [
    'Learner 1 is lost: silent for 10.0 s.'
  ]
  # Fenced: what its old life says does not count any more.
  beat = m.Heartbeat(1, 2, 'training', 9, 999, 7.0)
  update(status, MessageArrived(19.2, beat), ())
  assert status.learners[1].state == 'absent'
  assert status.learners[1].total_tokens == 25


def test_a_learner_that_leaves_is_done(hand_made):
  status = _status(hand_made, until=9.0)
  bye = m.Farewell(1, 2, 'SIGTERM')
  update(status, MessageArrived(9.5, bye), ())
  update(status, ConnectionLost(9.6, 1, 2, 'closed'), ())
  assert status.learners[1].state == 'done'
  assert status.happenings[-1].text == 'Learner 1 leaves: SIGTERM.'
  # Coming back, it has survived a fault after all, a planned one.
  hello = m.Hello(1, 'layout', incarnation=2)
  welcome = Send(1, m.Welcome(1, 3, 'by-hand', 1, 0, (0, 0), (-1, -1)))
  update(status, MessageArrived(12.0, hello), (welcome,))
  assert status.faults[-1].reason == 'SIGTERM'
  assert not status.faults[-1].is_new_process


def test_a_rejection_and_a_refusal_of_a_stranger(hand_made):
  status = _status(hand_made, until=9.0)
  sent = (
    Send(7, m.Rejection(7, 'learner 7 is not one of 2')),
    Send(7, m.Refusal(7, 0, 1, 1, m.Reason.FENCED, 'not connected')),
  )
  event = MessageArrived(9.1, m.Hello(7, 'layout'), PayloadFacts(10))
  update(status, event, sent)
  assert status.rejections == 1
  assert status.refusals == {'fenced': 1}


def test_receipts_clear_publications(hand_made):
  status = _status(hand_made, until=7.0)
  assert status.publications_in_flight == 1
  update(status, MessageArrived(7.1, m.Receipt(0, 1, 0)), ())
  assert status.publications_in_flight == 1
  update(status, MessageArrived(7.2, m.Receipt(1, 2, 0)), ())
  assert status.publications_in_flight == 0


def test_a_late_report_takes_nothing_back(hand_made):
  # Heartbeats overtake contributions.
  status = _status(hand_made, until=9.0)
  beat = m.Heartbeat(0, 1, 'training', 1, 10, 10.0)
  update(status, MessageArrived(9.1, beat), ())
  assert status.learners[0].total_tokens == 40
  assert status.learners[0].processed_tokens == 40


def test_work_done_again_is_processed_again(hand_made):
  # The syncer lost its memory with its process: learner 1 had reported 25
  # tokens, is admitted with 10 on its books and reports 18: 8 more.
  status = _status(hand_made, until=10.0)
  welcome = m.Welcome(1, 9, 'by-hand', 1, 0, (0, 0), (-1, -1), 0, 10)
  hello = MessageArrived(11.0, m.Hello(1, 'layout'))
  update(status, hello, (Send(1, welcome),))
  for tokens, processed in ((18, 33), (30, 45)):
    beat = m.Heartbeat(1, 9, 'training', 1, tokens, 5.0)
    update(status, MessageArrived(12.0, beat), ())
    assert status.learners[1].total_tokens == tokens
    assert status.learners[1].processed_tokens == processed


@pytest.mark.parametrize('new_start', [100.0, 0.0])
def test_a_restarted_syncer_continues(hand_made, new_start):
  header, _ = hand_made
  status = _status(hand_made, until=9.0)
  resume(status, header)
  assert {x.state for x in status.learners.values()} == {'absent'}
  event = Restarted(new_start, 2, None)
  update(status, event, (Broadcast(m.RoundOpened(1, 1)),))
  # The contribution to round 1 was accepted, and is lost.
  assert status.accepted == {}
  # A clock that began anew is moved to follow on the old one.
  away = 91.0 if new_start else 0.0
  assert status.now == 9.0 + away
  assert status.wall_seconds == 6.0 + away
  assert status.phase == 'running'
  (fault,) = status.faults
  assert (fault.learner, fault.seconds_away) == (None, away)
  hello = MessageArrived(new_start + 1.0, m.Hello(0, 'layout', incarnation=1))
  welcome = Send(0, m.Welcome(0, 5, 'by-hand', 1, 0, (0, 0), (-1, -1)))
  update(status, hello, (welcome,))
  # It was the syncer's fault, not the learner's.
  assert len(status.faults) == 1
  assert status.learners[0].restarts == 0
  assert status.learners[0].last_seen == 10.0 + away


@pytest.mark.parametrize('is_durable', [True, False])
def test_a_merge_whose_end_the_tape_has_not(hand_made, is_durable):
  header, _ = hand_made
  whole = _status(hand_made, until=7.0)
  status = _status(hand_made, until=6.0)
  resume(status, header)
  update(status, Restarted(9.0, 2, None, (0,) if is_durable else ()), ())
  assert status.rounds_merged == int(is_durable)
  assert status.merged_tokens == (whole.merged_tokens if is_durable else 0)
  assert status.merging == {}
  assert status.phase == 'running'


def test_a_status_only_resumes_its_own_run(hand_made):
  header, _ = hand_made
  other = dataclasses.replace(header, options={**header.options, 'run_id': 'x'})
  with pytest.raises(ValueError, match='goes on with another run, x'):
    resume(init(header), other)


def test_fold_and_catch_up_agree(hand_made, tmp_path):
  header, steps = hand_made
  other = dataclasses.replace(header, options={**header.options, 'run_id': 'x'})
  segments = (
    Segment(other, tuple(steps)),
    Segment(header, tuple(steps[:9])),
    Segment(header, tuple(steps[9:])),
  )
  folded = fold(Tape(segments, None))
  # The first run is another one; the loss of learner 1 is the syncer's fault.
  assert folded.run_id == 'by-hand'
  assert [fault.learner for fault in folded.faults] == [None]
  status = None
  follower = follow(tmp_path / 'tape')
  assert catch_up(status, follower) is None
  for segment in segments:
    writer = TapeWriter(tmp_path / 'tape', segment.header)
    for event, effects in segment.steps:
      writer.record(event, effects)
      status = catch_up(status, follower)
    writer.close()
  assert status is not None
  assert status.happenings == folded.happenings
  assert status.merged_tokens == folded.merged_tokens
  assert status.segment == folded.segment == 2


def test_only_a_syncers_tape_has_a_status(hand_made):
  header, _ = hand_made
  with pytest.raises(ValueError, match="from its syncer's tape"):
    init(dataclasses.replace(header, machine='learner'))
  with pytest.raises(ValueError, match="no option 'schedule'"):
    init(TapeHeader('syncer', {'run_id': 'r'}, (1,)))
  with pytest.raises(ValueError, match='1 fragment_sizes for num_fragments=2'):
    init(dataclasses.replace(header, fragment_sizes=(1,)))


def test_a_run_of_the_real_machines(tiny_run):
  # Learner 1 is killed at 8.3 and back at 12.3, learner 2 cut off at 15.
  faults = ((8.3, 1, 4.0, True), (15.0, 2, 5.0, False))
  run = tiny_run((1.0, 1.2, 2.0), num_fragments=4, rounds=30, faults=faults)
  status = fold(Tape((Segment(run.header, tuple(run.steps)),), None))
  assert status.rounds_merged == run.state.rounds_merged
  assert status.merged_tokens == pytest.approx(run.state.merged_tokens)
  assert status.accepted == {} and status.merging == {}
  # 8 bytes for each 16 elements, both ways.
  assert (status.bits_up, status.bits_down) == (4.0, 4.0)
  assert [(f.learner, f.is_new_process) for f in status.faults] == [
    (1, True),
    (2, False),
  ]
  away = [fault.seconds_away for fault in status.faults]
  assert away == pytest.approx([4.0, 5.0], abs=0.7)
  shares = [status.weight_share(learner) for learner in status.learners]
  assert sum(share or 0.0 for share in shares) == pytest.approx(1.0)
  zero, one, two = status.learners.values()
  assert zero.participation is not None and zero.participation > 0.95
  assert two.participation is not None and one.participation is not None
  assert 0 < two.participation < one.participation < 1
  for number, member in run.state.members.items():
    learner = status.learners[number]
    assert learner.total_tokens == member.total_tokens
    assert learner.incarnation == member.incarnation


def test_traffic_by_direction_and_purpose(hand_made):
  status = _status(hand_made)
  header, _ = hand_made
  value = sum(
    header.facts.get('fragment_value_bytes')
    or [4 * size for size in header.fragment_sizes]
  )
  first, second = (status.learners[m].traffic for m in range(2))
  assert first == {
    'down values': value,
    'up accepted': 75,
    'down publications': 300,
  }
  assert second == {
    'down values': 2 * value,  # When it came back, too.
    'up accepted': 50,
    'up refused': 50,
    'down publications': 200,
  }
  for learner in status.learners.values():
    up = [n for name, n in learner.traffic.items() if name.startswith('up')]
    assert sum(up) == learner.bytes_up
    assert sum(learner.traffic.values()) - sum(up) == learner.bytes_down
