"""A bounded queue that can be closed from either end."""

import threading

from decoupled_diloco.transport.inbox import Inbox


def test_first_in_first_out():
  inbox = Inbox(2)
  inbox.put(1)
  inbox.put(2)
  assert inbox.is_full
  assert [inbox.get(0), inbox.get(0), inbox.get(0)] == [1, 2, None]


def test_put_waits_for_room():
  inbox = Inbox(1)
  inbox.put(1)
  thread = threading.Thread(target=inbox.put, args=[2])
  thread.start()
  assert inbox.get(30) == 1
  assert inbox.get(30) == 2
  thread.join()


def test_closing_frees_everybody_who_waits():
  inbox = Inbox(1)
  inbox.put(1)
  writer = threading.Thread(target=inbox.put, args=[2])
  writer.start()
  inbox.close()
  writer.join()
  inbox.put(3)
  # What was in it is still there; nothing was added.
  assert [inbox.get(30), inbox.get(30)] == [1, None]


def test_adding_does_not_wait():
  inbox = Inbox(1)
  inbox.add(1)
  inbox.add(2)
  assert inbox.is_full
  inbox.close()
  inbox.add(3)
  assert [inbox.get(30), inbox.get(30), inbox.get(30)] == [1, 2, None]
