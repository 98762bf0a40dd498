"""Every kind of fault, within a quarter of a minute, for a small run."""

from decoupled_diloco.chaos import options


def get_config():
  config = options.default_config()
  config.faults.mean_seconds_between = 0.0
  config.faults.schedule = (
    (0.5, 'corrupt', (0,), 0.0),
    (1.0, 'kill', (1,), 0.0),
    (2.0, 'freeze', (0,), 1.0),
    (4.0, 'partition', (0,), 3.0),
    (8.0, 'slow', (0,), 1.0),
    (10.0, 'syncer', (), 0.0),
    (11.0, 'site', (0, 1), 0.0),
  )
  run = config.run
  run.membership.num_learners = 2
  run.membership.heartbeat_seconds = 0.25
  run.membership.liveness_timeout_seconds = 1.5
  run.schedule.sync_every = 24
  run.schedule.num_fragments = 6
  run.budget.rounds = 300
  run.model.width = 32
  run.model.layers = 1
  run.data.batch_size = 4
  run.evaluation.batches = 4
  run.evaluation.sample_tokens = 0
  run.launch.restart_seconds = 0.2
  run.throttle.step_seconds = 0.02
  run.snapshots.every_seconds = 1.0
  return config
