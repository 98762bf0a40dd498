"""200 faults of all kinds, one every six seconds, in twenty minutes.

  scripts/run python -m decoupled_diloco.chaos --config=configs/chaos_soak.py

Kills, freezes, partitions, slow links, flipped bits, the loss of a site (two of
four learners at once), and, in the first half, kills of the syncer. Learner 0
is never killed, so that its memory can be watched, as can that of the syncer in
the second half. Nothing may crash, everything merged must be there at the end,
and the event tape must replay to the same decisions.
"""

from decoupled_diloco.chaos import options, runs

SECONDS = 1200.0


def get_config():
  config = options.default_config()
  config.workdir = 'runs/chaos/soak'
  config.phases = ('decoupled',)
  faults = config.faults
  faults.mean_seconds_between = SECONDS / 205
  faults.weights = {
    'kill': 3.0,
    'freeze': 3.0,
    'partition': 3.0,
    'slow': 2.0,
    'corrupt': 3.0,
    'site': 0.5,
    'syncer': 0.5,
  }
  faults.sites = ((1, 2), (2, 3))
  faults.spare = ((0, 0.0), ('syncer', SECONDS / 2))

  run = config.run
  runs.make_paced(run, num_learners=4, step_seconds=0.2)
  run.membership.liveness_timeout_seconds = 4.0
  # One round takes 0.2 s, and a little more when learners are away.
  run.budget.rounds = int(SECONDS / 0.2)
  run.snapshots.every_seconds = 5.0
  return config
