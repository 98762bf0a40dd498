"""Trains a model with Decoupled DiLoCo.

  python -m decoupled_diloco.train --config=configs/quickstart.py

runs a syncer and all learners as processes of this machine. On several
machines, one process each:

  python -m decoupled_diloco.train --config=CONFIG --config.role=syncer \\
      --config.syncer.address=HOST:PORT
  python -m decoupled_diloco.train --config=CONFIG --config.role=learner \\
      --config.learner=0 --config.syncer.address=HOST:PORT

Any field of the config can be set with --config.SECTION.FIELD=VALUE; the fields
are those of the options in decoupled_diloco/run_options.py. The exit code is 0
only if the run met its budget and its parameters are finite, 2 if it could not
begin as it was asked to, 128 + n if signal n has stopped it, and 1 otherwise.
"""

import sys

from decoupled_diloco import stopping


def main(argv: list[str]) -> int:
  """Runs the role that the config names; returns the exit code."""
  stopping.at_once()
  # Only now, for it takes seconds.
  from decoupled_diloco import command

  return command.run(argv, __doc__ or '')


if __name__ == '__main__':
  sys.exit(main(sys.argv))
