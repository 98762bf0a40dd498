"""Memory is sampled now and then, and compared over a run's second half."""

import os

import pytest

from decoupled_diloco.chaos.memory import MemoryWatch, resident_bytes


def test_growth_over_the_second_half():
  pids, sizes = {0: 10, 1: 20, 'syncer': 30}, {}
  watch = MemoryWatch(lambda: pids, 1.0, sizes.get)
  for now in range(101):
    # Learner 0 grows by 1 a second, learner 1 is started again at 30 s, and of
    # the syncer nothing is known.
    sizes.update({10: 1000 + now, 20: 500, 21: 500})
    pids[1] = 20 if now < 30 else 21
    watch.poll(float(now))
    watch.poll(now + 0.5)  # Too early for another sample.
  growth = watch.growth(0.0, 100.0)
  assert set(growth) == {0}
  # The medians over 50 to 55 s, and over 95 to 100 s.
  assert growth[0] == (1052.5, 1097.5)
  assert growth[0].share == pytest.approx(45 / 1052.5)


def test_of_a_real_process():
  here = resident_bytes(os.getpid())
  assert here is None or here > 10_000_000
  assert resident_bytes(2**22 + 1) is None
