"""A tape is written beside the thread whose events are on it."""

import threading

import pytest

from decoupled_diloco.protocol import events as ev
from decoupled_diloco.runtime.recording import Recording

DEADLINE_SECONDS = 30.0


def _events(count):
  return [ev.TimePassed(float(i)) for i in range(count)]


def test_everything_is_written_in_order_by_another_thread():
  written, threads = [], set()

  def record(event, effects):
    threads.add(threading.get_ident())
    written.append((event, effects))

  with Recording(record, queue_size=2) as recording:
    for event in _events(100):
      recording.put(event, ())
  assert written == [(event, ()) for event in _events(100)]
  assert threads.isdisjoint({threading.get_ident()})


def test_who_finds_no_room_waits_and_nothing_is_lost():
  may_write, written, put = threading.Event(), [], []

  def record(event, effects):
    assert may_write.wait(DEADLINE_SECONDS)
    written.append(event)

  with Recording(record, queue_size=2) as recording:

    def fill():
      for event in _events(10):
        recording.put(event, ())
        put.append(event)

    filling = threading.Thread(target=fill)
    filling.start()
    # One is being written and two wait: the fourth finds no room.
    while len(put) < 3:
      assert filling.is_alive()
    assert len(put) == 3
    may_write.set()
    filling.join(DEADLINE_SECONDS)
  assert written == _events(10)


class _FullDisk:
  """Takes three events."""

  def __init__(self):
    self.written = []
    self.has_refused = threading.Event()

  def record(self, event, effects):
    if len(self.written) == 3:
      self.has_refused.set()
      raise OSError('no space left on device')
    self.written.append(event)


def test_an_error_is_told_once_and_leaves_no_gap():
  disk = _FullDisk()
  with Recording(disk.record, queue_size=2) as recording:
    for event in _events(4):
      recording.put(event, ())
    assert disk.has_refused.wait(DEADLINE_SECONDS)
    with pytest.raises(OSError, match='no space left'):
      for event in _events(100):
        recording.put(event, ())
    disk.written.pop()  # Room again; but the tape would have a gap.
    for event in _events(100):
      recording.put(event, ())
  assert disk.written == _events(2)


def test_an_error_in_the_last_event_is_told_at_the_end():
  disk = _FullDisk()
  with (
    pytest.raises(OSError, match='no space left'),
    Recording(disk.record) as recording,
  ):
    for event in _events(4):
      recording.put(event, ())


def test_what_is_on_its_way_says_more_than_the_tapes_error():
  disk = _FullDisk()
  with (
    pytest.raises(FloatingPointError, match='not finite'),
    Recording(disk.record) as recording,
  ):
    for event in _events(4):
      recording.put(event, ())
    raise FloatingPointError('not finite')
  assert disk.written == _events(3)
