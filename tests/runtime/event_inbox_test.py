"""What waits for the thread that drives the syncer's machine."""

import threading

from decoupled_diloco.runtime.event_inbox import EventInbox

DEADLINE_SECONDS = 30.0


def test_first_in_first_out():
  inbox = EventInbox[int](3)
  for item in (1, 2, 3):
    inbox.put(item)
  assert [inbox.get(0.0) for _ in range(4)] == [1, 2, 3, None]


def test_the_world_outside_waits_for_room():
  inbox = EventInbox[int](1)
  inbox.put(1)
  waiting = threading.Thread(target=inbox.put, args=(2,))
  waiting.start()
  assert inbox.get(0.0) == 1
  waiting.join(DEADLINE_SECONDS)
  assert inbox.get(0.0) == 2


def test_what_was_made_inside_never_waits():
  # The thread that empties the inbox may be the one that fills it.
  inbox = EventInbox[int](1)
  inbox.put(1)
  inbox.put_result(2)
  assert (inbox.get(0.0), inbox.get(0.0)) == (1, 2)


def test_closed_nobody_waits_and_nothing_is_kept():
  inbox = EventInbox[int](1)
  inbox.put(1)
  waiting = threading.Thread(target=inbox.put, args=(2,))
  waiting.start()
  inbox.close()
  waiting.join(DEADLINE_SECONDS)
  assert not waiting.is_alive()
  inbox.put(3)
  inbox.put_result(4)
  assert inbox.get(0.0) is None
