import threading

import pytest

from decoupled_diloco.data.prefetch import Prefetcher


class Counter:
  """0, 1, 2, ... up to `stop`, where it raises `error`."""

  def __init__(self, stop=10**9, error: type[BaseException] = StopIteration):
    self.position = 0
    self.stop = stop
    self.error = error

  def __next__(self):
    if self.position == self.stop:
      raise self.error('from the iterator')
    self.position += 1
    return self.position - 1

  def get_state(self):
    return {'position': self.position}

  def set_state(self, state):
    if state['position'] < 0:
      self.position = -1000  # not even a refusal's side effects may show
      raise ValueError('refused')
    self.position = state['position']


@pytest.fixture(autouse=True)
def no_thread_is_left():
  yield
  assert 'data-prefetch' not in [t.name for t in threading.enumerate()]


def test_items_come_in_order_and_end():
  with Prefetcher(Counter(stop=7)) as prefetcher:
    assert list(prefetcher) == list(range(7))
    with pytest.raises(StopIteration):
      next(prefetcher)


@pytest.mark.parametrize('depth', [1, 3])
def test_never_further_ahead_than_depth(depth):
  requested = 0
  lead = []

  class Watched(Counter):
    def __next__(self):
      item = super().__next__()
      # `item` items were made before this one, `requested` asked for: this
      # one makes item + 1.
      lead.append(item + 1 - requested)
      return item

  with Prefetcher(Watched(), depth) as prefetcher:
    for item in range(50):
      requested += 1
      assert next(prefetcher) == item
  assert max(lead) <= depth


def test_it_does_work_ahead():
  made = threading.Event()

  class Watched(Counter):
    def __next__(self):
      item = super().__next__()
      if item == 2:
        made.set()
      return item

  with Prefetcher(Watched(), depth=3):
    assert made.wait(60)  # though nothing was taken


def test_position_is_that_of_what_was_taken():
  with Prefetcher(Counter(), depth=4) as prefetcher:
    assert prefetcher.get_state() == {'position': 0}
    for item in range(5):
      assert next(prefetcher) == item
      assert prefetcher.get_state() == {'position': item + 1}
    state = prefetcher.get_state()
  with Prefetcher(Counter(), depth=2) as restored:
    restored.set_state(state)
    assert restored.get_state() == state
    assert [next(restored) for _ in range(3)] == [5, 6, 7]


def test_a_refused_state_changes_nothing():
  with Prefetcher(Counter()) as prefetcher:
    assert next(prefetcher) == 0
    with pytest.raises(ValueError, match='refused'):
      prefetcher.set_state({'position': -1})
    assert [next(prefetcher) for _ in range(3)] == [1, 2, 3]


def test_place_runs_in_the_thread():
  def place(item):
    return (item, threading.current_thread().name)

  with Prefetcher(Counter(), place=place) as prefetcher:
    assert next(prefetcher) == (0, 'data-prefetch')


def test_an_error_of_the_iterator_arrives_in_its_turn():
  with Prefetcher(Counter(stop=3, error=OSError), depth=5) as prefetcher:
    assert [next(prefetcher) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
      with pytest.raises(OSError, match='from the iterator'):
        next(prefetcher)
    # It can be restored to before the error.
    prefetcher.set_state({'position': 1})
    assert next(prefetcher) == 1


def test_an_error_of_place_arrives_too():
  def place(item):
    return 1 // (2 - item)

  with Prefetcher(Counter(), place=place) as prefetcher:
    assert next(prefetcher) == 0  # 1 // 2
    assert next(prefetcher) == 1  # 1 // 1
    with pytest.raises(ZeroDivisionError):
      next(prefetcher)


def test_close_ends_a_thread_that_waits_for_room_and_may_be_repeated():
  prefetcher = Prefetcher(Counter(), depth=1)
  next(prefetcher)
  prefetcher.close()
  prefetcher.close()
  with pytest.raises(RuntimeError, match='closed'):
    next(prefetcher)
  with pytest.raises(RuntimeError, match='closed'):
    prefetcher.set_state({'position': 0})
  assert prefetcher.get_state() == {'position': 1}


def test_close_wakes_a_consumer_that_waits():
  gate = threading.Event()
  prefetcher = Prefetcher(Counter(), place=lambda item: gate.wait(60))
  closer = threading.Thread(target=prefetcher.close)
  closer.start()
  # Nothing is ready, as `place` waits; only close() can end this call.
  with pytest.raises(RuntimeError, match='closed'):
    next(prefetcher)
  gate.set()
  closer.join()


def test_depth_must_be_positive():
  with pytest.raises(ValueError, match='depth must be at least 1, got 0'):
    Prefetcher(Counter(), depth=0)
