"""The syncer is killed twenty times at random during one run.

  scripts/run python -m decoupled_diloco.chaos --config=configs/chaos_syncer.py

The run must end with its budget met, nothing that was merged before a kill may
be missing after it, and no token may be merged twice: the audit says so. Ten
minutes on two cores.
"""

from decoupled_diloco.chaos import options


def get_config():
  config = options.default_config()
  config.workdir = 'runs/chaos/syncer'
  config.phases = ('decoupled',)
  config.faults.mean_seconds_between = 20.0
  config.faults.weights = {'syncer': 1.0}
  config.faults.max_faults = 20

  run = config.run
  run.membership.num_learners = 2
  run.schedule.sync_every = 24
  run.schedule.num_fragments = 6
  run.budget.rounds = 4600
  run.model.width = 32
  run.model.layers = 1
  run.data.batch_size = 4
  run.throttle.step_seconds = 0.025
  # So that both the journal and snapshots of it are gone back to.
  run.durability.snapshot_growth = 1.0
  return config
