"""Runs a study of the quality lab.

  python -m decoupled_diloco.lab --config=configs/lab/NAME.py

A study is a grid of runs with several seeds, each a whole cluster in one
process on a virtual clock, with real gradients. Results are kept as they come
in the study's workdir: interrupt it when you like, and start it again to go on.
There are results.jsonl, table.md, table.csv and plot.png, written anew after
each run.

Fields of the study and of its runs can be set on the command line:
  --config.seeds='(0,)'            fewer seeds
  --config.run.budget.rounds=600   shorter runs
  --config.processes=1             one run at a time
"""

import signal
import sys

from decoupled_diloco import stopping


def main(argv: list[str]) -> int:
  """Runs the study; returns the exit code."""
  stopping.at_once()
  # Only now, for it takes seconds.
  from decoupled_diloco.lab import command

  for number in stopping.SIGNALS:
    signal.signal(number, _interrupt)
  try:
    return command.run(argv, __doc__ or '')
  except _Interrupted as interrupted:
    print(
      f'{stopping.reason(interrupted.number)}; start it again to go on.',
      file=sys.stderr,
    )
    return stopping.exit_code(interrupted.number)


class _Interrupted(BaseException):
  """A signal has come; runs that are not finished are given up."""

  def __init__(self, number: int):
    super().__init__(number)
    self.number = number


def _interrupt(number: int, frame: object) -> None:
  del frame
  raise _Interrupted(number)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
