"""Pauses between attempts."""

import random

from decoupled_diloco.transport.backoff import Backoff
from decoupled_diloco.transport.options import TransportOptions


def test_doubles_up_to_the_maximum_and_begins_again():
  backoff = Backoff(
    TransportOptions(
      backoff_initial_seconds=1, backoff_maximum_seconds=5, backoff_jitter=0
    ),
    random.Random(0),
  )
  assert [backoff.next() for _ in range(5)] == [1, 2, 4, 5, 5]
  backoff.reset()
  assert backoff.next() == 1


def test_jitter_leaves_out_a_random_part():
  class Rng(random.Random):
    def random(self):
      return 0.5

  backoff = Backoff(
    TransportOptions(
      backoff_initial_seconds=1, backoff_maximum_seconds=5, backoff_jitter=0.4
    ),
    Rng(),
  )
  # Half of 40 % is left out of 1, 2, 4.
  assert [backoff.next() for _ in range(3)] == [0.8, 1.6, 3.2]
