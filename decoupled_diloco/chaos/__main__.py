"""Injects faults into real runs, and shows what they cost.

  python -m decoupled_diloco.chaos --config=configs/chaos.py

Processes are killed and frozen, links cut, slowed down and made to flip bits,
the syncer and whole sites killed, as a seeded schedule says; then the same run
goes undisturbed, and its synchronous baseline has the same faults. At the end
goodput, yield, participation, uptime, times to notice and to come back, and the
held-out loss stand side by side, and what an audit of the event tapes has
found.

A run that is complete is not run again: start the command again to go on. Any
field can be set on the command line:
  --config.faults.seed=1                     other faults
  --config.faults.mean_seconds_between=5     more of them
  --config.faults.weights.freeze=1.0         of other kinds, too
  --config.run.budget.rounds=600             shorter runs
  --config.phases="('decoupled',)"           fewer runs

The exit code is 0 if every run met its budget, no process crashed and the audit
found nothing.
"""

import sys

from decoupled_diloco import stopping


def main(argv: list[str]) -> int:
  """Carries the experiment out; returns the exit code."""
  stopping.at_once()
  # Only now, for it takes seconds.
  from decoupled_diloco.chaos import command

  return command.run(argv, __doc__ or '')


if __name__ == '__main__':
  sys.exit(main(sys.argv))
