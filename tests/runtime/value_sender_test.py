"""Who lacks a fragment is sent its value, encoded elsewhere."""

import pytest

from decoupled_diloco.runtime.value_sender import Encoded, ValueSender
from tests.runtime.waiting_executor import WaitingExecutor


class Desk:
  """A server of three fragments; `posted` is its inbox."""

  def __init__(self):
    self.versions = [0, 0, 0]
    self.merging = set()
    self.sent = []
    self.full = set()
    self.posted = []
    self.encoded = []
    self.executor = WaitingExecutor()
    self.values = ValueSender(
      self, self.encode, self.executor, self.posted.append
    )

  def version_of(self, fragment):
    return self.versions[fragment]

  def is_merging(self, fragment):
    return fragment in self.merging

  def send_value(self, learner, fragment, payload):
    if learner in self.full:
      return False
    self.sent.append((learner, fragment, bytes(payload)))
    return True

  def encode(self, fragment):
    self.encoded.append(fragment)
    return b'%d v%d' % (fragment, self.versions[fragment])

  def work(self):
    """Lets everything be encoded, and hands it in."""
    while self.executor.waiting or self.posted:
      while self.executor.waiting:
        self.executor.run_next()
      for item in self.posted[:]:
        self.posted.remove(item)
        assert isinstance(item, Encoded)
        self.values.take(item)


@pytest.fixture
def desk():
  return Desk()


def test_nothing_is_encoded_at_once(desk):
  desk.values.add(7, (0, 1, 2))
  assert not desk.encoded
  assert len(desk.executor.waiting) == 1  # And never two payloads in memory.
  desk.work()
  assert desk.sent == [(7, 0, b'0 v0'), (7, 1, b'1 v0'), (7, 2, b'2 v0')]
  assert not any(desk.values.is_lacking(7, p) for p in range(3))


def test_who_lacks_the_same_is_served_by_one_encoding(desk):
  desk.values.add(1, (0, 2))
  desk.values.add(2, (2,))
  desk.work()
  assert desk.encoded == [0, 2]
  assert desk.sent == [(1, 0, b'0 v0'), (1, 2, b'2 v0'), (2, 2, b'2 v0')]


def test_a_fragment_that_is_being_merged_is_sent_afterwards(desk):
  desk.merging = {0}
  desk.values.add(1, (0, 1))
  desk.work()
  assert desk.sent == [(1, 1, b'1 v0')]
  desk.merging, desk.versions[0] = set(), 1
  desk.values.go_on()
  desk.work()
  assert desk.sent[1:] == [(1, 0, b'0 v1')]


def test_a_merge_that_comes_meanwhile_waits_and_the_value_is_the_old_one(desk):
  desk.values.add(1, (0,))
  pending = desk.values.pending(0)
  assert pending is desk.executor.waiting[0][0]
  assert desk.values.pending(1) is None
  desk.executor.run_next()
  desk.merging = {0}  # It may begin now.
  desk.work()
  # Version 1 will follow as a publication.
  assert desk.sent == [(1, 0, b'0 v0')]
  assert not desk.values.is_lacking(1, 0)
  assert desk.values.pending(0) is None


def test_what_has_grown_old_is_encoded_again(desk):
  desk.values.add(1, (0,))
  desk.executor.run_next()
  desk.versions[0] = 1  # Published before the value was handed in.
  assert desk.values.is_lacking(1, 0)  # So this learner was not sent it.
  desk.work()
  assert desk.sent == [(1, 0, b'0 v1')]


def test_who_has_no_room_is_tried_again_at_a_sign_of_life(desk):
  desk.full = {1}
  desk.values.add(1, (0, 1))
  desk.values.add(2, (1,))
  desk.work()
  # Fragment 1 is for the other one; nothing is encoded in vain after the first.
  assert desk.encoded == [0, 1]
  assert desk.sent == [(2, 1, b'1 v0')]
  desk.values.retry(1)
  desk.work()
  assert desk.encoded == [0, 1, 0]
  desk.full = set()
  desk.values.retry(1)
  desk.work()
  assert desk.sent[1:] == [(1, 0, b'0 v0'), (1, 1, b'1 v0')]


def test_what_did_not_fit_waits_for_a_sign_of_life(desk):
  desk.values.add(1, (0,), has_room=False)
  assert not desk.executor.waiting
  desk.values.retry(1)
  desk.work()
  assert desk.sent == [(1, 0, b'0 v0')]


def test_who_is_gone_or_new_is_sent_nothing_of_old(desk):
  desk.values.add(1, (0, 1))
  desk.values.add(2, (0, 1))
  desk.values.forget(1)
  desk.values.welcome(2)
  desk.values.add(2, (1,))
  desk.work()
  assert desk.sent == [(2, 1, b'1 v0')]


def test_an_error_is_posted(desk):
  def encode(fragment):
    raise MemoryError(f'fragment {fragment}')

  values = ValueSender(desk, encode, desk.executor, desk.posted.append)
  values.add(1, (0,))
  desk.executor.run_next()
  (error,) = desk.posted
  assert isinstance(error, MemoryError)
