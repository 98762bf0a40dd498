"""What every transport promises, over every transport."""

import math

import pytest

from decoupled_diloco.protocol.messages import (
  Contribution,
  Farewell,
  Heartbeat,
  Hello,
  Publication,
  Receipt,
  Rejection,
  RoundOpened,
  RunEnded,
)
from decoupled_diloco.transport.base import LinkDown, LinkUp, Parcel, PeerBytes

HELLO = Hello(learner=0, layout='layout')
# conftest.OPTIONS: packets of 64 KiB, chunks of 32 KiB, a window of 256 KiB,
# payloads up to 6 MiB, messages up to 4 KiB, 2 payloads queued by a link, 3 per
# peer by an endpoint.
CHUNK = 32 << 10
WINDOW = 256 << 10
MEGABYTE = b'\xa5' * 1_000_000


def contribution(round_):
  return Contribution(
    learner=0,
    incarnation=1,
    round=round_,
    fragment=0,
    base_version=0,
    steps=3,
    tokens=96,
    total_steps=3,
    total_tokens=96,
    step_seconds=0.1,
  )


def publication(round_):
  return Publication(
    round=round_, fragment=0, version=round_, contributors=(0,), form='value'
  )


def heartbeat(total_steps, loss=None):
  return Heartbeat(
    learner=0,
    incarnation=1,
    activity='training',
    total_steps=total_steps,
    total_tokens=0,
    tokens_per_second=0.0,
    loss=loss,
  )


def pattern(size):
  return (bytes(range(251)) * (size // 251 + 1))[:size]


def test_messages_keep_their_order_in_both_directions(harness):
  link, peer = harness.connect(HELLO)
  up = [
    Receipt(learner=0, incarnation=1, round=round_) for round_ in range(200)
  ]
  down = [RoundOpened(round=round_, fragment=0) for round_ in range(200)]
  for message_up, message_down in zip(up, down, strict=True):
    assert link.send(message_up) == ()
    assert harness.endpoint.send(peer, message_down)
  assert [harness.arrival()[1].message for _ in up] == up
  assert [harness.event(link).message for _ in down] == down


@pytest.mark.parametrize(
  'size', [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5_000_000]
)
def test_payloads_arrive_as_they_were_sent(harness, size):
  link, peer = harness.connect(HELLO)
  payload = pattern(size)

  link.send(contribution(7), payload)
  arrived_peer, parcel = harness.arrival()
  assert arrived_peer == peer
  assert (parcel.message, parcel.is_intact) == (contribution(7), True)
  assert parcel.payload == payload
  assert parcel.wire_bytes > size

  assert harness.endpoint.send(peer, publication(7), memoryview(payload))
  parcel = harness.event(link)
  assert (parcel.message, parcel.is_intact) == (publication(7), True)
  assert parcel.payload == payload


def test_control_overtakes_payloads(harness):
  link, peer = harness.connect(HELLO)
  harness.hold()
  # A megabyte is four windows, so it cannot be sent while nothing passes.
  link.send(contribution(0), MEGABYTE)
  link.send(heartbeat(1))
  harness.endpoint.send(peer, publication(0), MEGABYTE)
  harness.endpoint.send(peer, RoundOpened(round=1, fragment=0))
  harness.release()
  assert harness.arrival()[1].message == heartbeat(1)
  assert harness.arrival()[1].message == contribution(0)
  assert harness.event(link).message == RoundOpened(round=1, fragment=0)
  assert harness.event(link).message == publication(0)


def test_a_link_drops_its_oldest_unsent_payload(harness):
  link, _ = harness.connect(HELLO)
  harness.hold()
  sent = [contribution(round_) for round_ in range(6)]
  dropped = [each for m in sent for each in link.send(m, MEGABYTE)]
  harness.release()
  kept = [message for message in sent if message not in dropped]
  # The last two are queued; one before them may have been begun in time.
  assert dropped == [message for message in sent if message in dropped]
  assert len(dropped) in (3, 4)
  assert kept[-2:] == sent[-2:]
  assert [harness.arrival()[1].message for _ in kept] == kept


def test_an_endpoint_refuses_what_it_cannot_queue(harness):
  link, peer = harness.connect(HELLO)
  harness.hold()
  sent = [publication(round_) for round_ in range(8)]
  kept = [m for m in sent if harness.endpoint.send(peer, m, MEGABYTE)]
  # Three are queued, and one more may be on its way.
  assert len(kept) in (3, 4)
  assert harness.endpoint.queued_payloads(peer) == 3
  # Control is not refused for it.
  assert harness.endpoint.send(peer, RunEnded(reason='done'))
  harness.release()
  assert harness.event(link).message == RunEnded(reason='done')
  assert [harness.event(link).message for _ in kept] == kept


def test_a_learner_that_does_not_look_is_not_buried(harness):
  link, peer = harness.connect(HELLO)
  sent = []
  # It takes two payloads (receive_queue) and part of a third (the window); the
  # endpoint queues three. So in the end one is refused, if not by a race won.
  for round_ in range(100):
    if not harness.endpoint.send(peer, publication(round_), MEGABYTE):
      break
    sent.append(publication(round_))
    # One up and one down each time: control passes all the while.
    assert link.send(heartbeat(round_)) == ()
    assert harness.arrival()[1].message == heartbeat(round_)
  assert 3 <= len(sent) <= 2 + 1 + 3 + 1
  # 1 % for the framing of chunks and for the control messages.
  limit = 1.01 * (2 * len(MEGABYTE) + WINDOW)
  assert harness.endpoint.peer_bytes(peer).sent < limit
  assert [harness.event(link).message for _ in sent] == sent


# The smaller one shares a packet with its message.
@pytest.mark.parametrize('size', [4000, 1_000_000])
def test_a_corrupt_payload_is_flagged(harness, size):
  link, peer = harness.connect(HELLO)
  payload = MEGABYTE[:size]
  harness.corrupt_next()
  link.send(contribution(3), payload)
  _, parcel = harness.arrival()
  assert parcel.message == contribution(3)
  assert (parcel.payload, parcel.is_intact) == (b'', False)

  harness.corrupt_next()
  harness.endpoint.send(peer, publication(3), payload)
  parcel = harness.event(link)
  assert parcel.message == publication(3)
  assert (parcel.payload, parcel.is_intact) == (b'', False)

  # The connection is as good as before.
  link.send(contribution(3), payload)
  assert harness.arrival()[1].payload == payload


def test_a_link_comes_back_to_a_new_endpoint(harness):
  link, peer = harness.connect(HELLO)
  harness.endpoint.close(0)
  assert isinstance(harness.event(link), LinkDown)
  assert isinstance(harness.arrival()[1], str)

  harness.start_endpoint()
  while (event := harness.event(link)) != LinkUp():
    assert isinstance(event, LinkDown)
  link.send(HELLO)
  _, parcel = harness.arrival()
  assert parcel.message == HELLO
  del peer  # Numbers begin anew with an endpoint.


def test_both_sides_hear_of_a_broken_connection(harness):
  link, peer = harness.connect(HELLO)
  harness.hold()
  link.send(contribution(0), MEGABYTE)
  link.send(contribution(1), MEGABYTE)
  harness.sever()
  down = harness.event(link)
  assert isinstance(down, LinkDown)
  assert down.reason
  assert down.dropped == (contribution(0), contribution(1))
  lost_peer, reason = harness.arrival()
  assert lost_peer == peer
  assert isinstance(reason, str)
  assert reason
  assert not harness.endpoint.send(peer, RoundOpened(round=0, fragment=0))
  assert harness.endpoint.queued_payloads(peer) == 0
  assert harness.endpoint.peer_bytes(peer) == PeerBytes(0, 0)

  harness.release()
  while (event := harness.event(link)) != LinkUp():
    assert isinstance(event, LinkDown)
  link.send(HELLO)
  new_peer, parcel = harness.arrival()
  assert new_peer > peer
  assert parcel.message == HELLO


def test_nothing_is_sent_before_the_learner_knows_of_its_connection(harness):
  link = harness.new_link()
  assert link.send(HELLO) == (HELLO,)
  link.start()
  assert link.send(HELLO) == (HELLO,)
  assert harness.event(link) == LinkUp()
  assert link.send(HELLO) == ()
  assert harness.arrival()[1].message == HELLO

  harness.sever()
  # The first connection is gone, and a second one may be there already.
  assert isinstance(harness.event(link), LinkDown)
  assert link.send(heartbeat(1)) == (heartbeat(1),)
  while harness.event(link) != LinkUp():
    pass
  assert isinstance(harness.arrival()[1], str)
  link.send(HELLO)
  assert harness.arrival()[1].message == HELLO


def test_disconnecting_lets_control_out_first(harness):
  link, peer = harness.connect(HELLO)
  harness.endpoint.send(peer, publication(0), MEGABYTE)
  for round_ in range(50):
    harness.endpoint.send(peer, RoundOpened(round=round_, fragment=0))
  harness.endpoint.send(peer, Rejection(learner=0, reason='wrong layout'))
  harness.endpoint.disconnect(peer, 'rejected: wrong layout')
  assert not harness.endpoint.send(peer, RoundOpened(round=50, fragment=0))

  messages = []
  while isinstance(event := harness.event(link), Parcel):
    messages.append(event.message)
  # The payload may have been through already.
  messages = [m for m in messages if m != publication(0)]
  assert messages == [RoundOpened(round=r, fragment=0) for r in range(50)] + [
    Rejection(learner=0, reason='wrong layout')
  ]
  assert isinstance(event, LinkDown)
  assert event.reason == 'rejected: wrong layout'
  assert harness.arrival() == (peer, 'rejected: wrong layout')


def test_closing_a_link_lets_control_out_first(harness):
  link, peer = harness.connect(HELLO)
  for step in range(50):
    link.send(heartbeat(step))
  link.send(Farewell(learner=0, incarnation=1, reason='done'))
  link.close(30)
  link.close(30)
  assert link.send(HELLO) == (HELLO,)
  messages = [harness.arrival()[1].message for _ in range(51)]
  assert messages == [heartbeat(step) for step in range(50)] + [
    Farewell(learner=0, incarnation=1, reason='done')
  ]
  assert harness.arrival() == (peer, 'The learner has closed the connection.')


def test_closing_an_endpoint_lets_control_out_first(harness):
  link, peer = harness.connect(HELLO)
  harness.endpoint.send(peer, RunEnded(reason='done'))
  harness.endpoint.close(30)
  harness.endpoint.close(30)
  assert harness.event(link).message == RunEnded(reason='done')
  assert isinstance(harness.event(link), LinkDown)
  assert harness.arrival() == (peer, 'The syncer has closed the connection.')
  assert not harness.endpoint.send(peer, RunEnded(reason='done'))


def test_closing_does_not_wait_for_a_side_that_is_cut_off(harness):
  link, peer = harness.connect(HELLO)
  harness.hold()
  link.send(Farewell(learner=0, incarnation=1, reason='done'))
  harness.endpoint.send(peer, RunEnded(reason='done'))
  link.close(0)
  harness.endpoint.close(0)
  assert isinstance(harness.arrival()[1], str)
  harness.start_endpoint()  # At the same address, at once.


def test_closing_what_was_never_started(harness):
  harness.new_link().close(1)
  harness.new_endpoint().close(1)


@pytest.mark.parametrize('round_', range(3))
def test_an_address_is_free_as_soon_as_it_is_closed(harness, round_):
  del round_
  for _ in range(3):
    link, _ = harness.connect(HELLO)
    link.close(0)
    assert isinstance(harness.arrival()[1], str)
    harness.endpoint.close(0)
    harness.start_endpoint()


def test_one_endpoint_per_address(harness):
  with pytest.raises(OSError, match='must be free'):
    harness.new_endpoint().start(lambda *_: None, lambda *_: None)


def test_what_cannot_be_sent_is_refused_by_the_sender(harness):
  link, peer = harness.connect(HELLO)
  too_large = bytes((6 << 20) + 1)
  with pytest.raises(ValueError, match='max_payload_bytes=6291456'):
    link.send(contribution(0), too_large)
  with pytest.raises(ValueError, match='max_payload_bytes'):
    harness.endpoint.send(peer, publication(0), too_large)
  with pytest.raises(ValueError, match='max_message_bytes=4096'):
    link.send(Farewell(learner=0, incarnation=1, reason='x' * 5000))
  with pytest.raises(ValueError, match=r'loss=nan must be finite'):
    link.send(heartbeat(0, loss=math.nan))
  with pytest.raises(ValueError, match='cannot be sent'):
    link.send(Receipt(learner=0, incarnation=1, round=2**63))
  link.send(heartbeat(1))
  assert harness.arrival()[1].message == heartbeat(1)


def test_two_learners_are_two_peers(harness):
  first, first_peer = harness.connect(HELLO)
  second, second_peer = harness.connect(Hello(learner=1, layout='layout'))
  assert second_peer > first_peer
  harness.endpoint.send(first_peer, RoundOpened(round=1, fragment=0))
  harness.endpoint.send(second_peer, RoundOpened(round=2, fragment=0))
  assert harness.event(first).message == RoundOpened(round=1, fragment=0)
  assert harness.event(second).message == RoundOpened(round=2, fragment=0)
  second.close(5)
  assert harness.arrival()[0] == second_peer
  assert first.send(heartbeat(1)) == ()
  assert harness.arrival()[0] == first_peer


def test_both_sides_count_the_same_bytes(harness):
  link, peer = harness.connect(HELLO)
  link.send(heartbeat(1))
  _, first = harness.arrival()
  harness.endpoint.send(peer, RoundOpened(round=1, fragment=0))
  down = harness.event(link)
  link.send(heartbeat(1))
  harness.arrival()
  # Two heartbeats, of which the size is known, and the hello before them.
  counted = harness.endpoint.peer_bytes(peer)
  assert counted == PeerBytes(link.bytes_received, link.bytes_sent)
  assert counted.sent == down.wire_bytes
  assert counted.received > 2 * first.wire_bytes
