"""Results side by side, and what of them is not right."""

import dataclasses
import signal

from rich.console import Console

from decoupled_diloco.chaos import report
from decoupled_diloco.chaos.decoupled import crashes
from decoupled_diloco.chaos.injector import Struck
from decoupled_diloco.chaos.result import ChaosResult
from decoupled_diloco.chaos.schedule import Fault
from decoupled_diloco.runtime.learner_fleet import End

GOOD = ChaosResult(
  is_complete=True,
  end_reason='100 rounds',
  held_out_loss=1.25,
  merged_tokens=1e6,
  wall_seconds=75.0,
  goodput=0.72,
  yield_=0.9,
  participation=0.8,
  available=0.75,
  uptime=1.0,
  faults={'kill': 3, 'freeze': 1},
  faults_in_vain=1,
  detect_seconds=0.05,
  rejoin_seconds=6.5,
  crashes=(),
  lives=1,
  refusals={'late': 2},
  memory_growth={'syncer': 0.012, '0': -0.004},
  problems=(),
)


def test_the_table():
  # 0.72 of the 0.75 that were left.
  results = {'decoupled': GOOD, 'undisturbed': GOOD}
  text = report.as_markdown(results)
  assert '| | decoupled | undisturbed |' in text
  assert '| goodput | 72.0 % | 72.0 % |' in text
  assert '| goodput / available | 96.0 % | 96.0 % |' in text
  assert '| faults | 4 (1 freeze, 3 kill) |' in text
  assert 'syncer +1.2%, learner 0 -0.4%' in text
  console = Console(width=80)
  with console.capture() as capture:
    console.print(report.as_table(results))
  lines = capture.get().splitlines()
  assert len(lines) > len(report.ROWS)
  assert max(map(len, lines)) <= 80


def test_what_is_unknown_has_a_dash():
  bare = dataclasses.replace(
    GOOD, goodput=None, yield_=None, held_out_loss=None, rejoin_seconds=None
  )
  assert '| goodput / available | - |' in report.as_markdown({'a': bare})


def test_what_is_not_right():
  assert not report.faults_found({'decoupled': GOOD})
  bad = dataclasses.replace(
    GOOD,
    is_complete=False,
    crashes=[f'learner {m} ended with 1' for m in range(7)],
    problems=['The tape does not replay: x'],
  )
  found = report.faults_found({'decoupled': bad})
  assert found[0] == 'decoupled: the run is not complete (100 rounds).'
  assert 'decoupled, crash: and 2 more' in found
  assert found[-1] == 'decoupled, audit: The tape does not replay: x'


def test_crashes_are_the_ends_that_nobody_has_caused():
  struck = [Struck(Fault(1.0, 'kill', (0,)), 1e9, (0,), (10,))]
  ends = [
    End(0, 10, -signal.SIGKILL),  # Injected.
    End(0, 11, -signal.SIGKILL),  # By somebody else: out of memory, perhaps.
    End(1, 12, 0),
    End('syncer', 13, 1),
    # Killed, but it had ended before.
    End(0, 10, 1),
  ]
  assert crashes(ends, struck) == [
    'learner 0 ended with -9',
    'the syncer ended with 1',
    'learner 0 ended with 1',
  ]
