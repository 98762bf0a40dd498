"""Two tiny learners on Shakespeare, for the tests of whole runs."""

from decoupled_diloco import configuring


def get_config():
  config = configuring.default_config()
  config.membership.num_learners = 2
  config.schedule.sync_every = 24
  config.schedule.num_fragments = 6
  config.budget.rounds = 700
  config.model.width = 32
  config.model.layers = 1
  config.data.batch_size = 4
  config.evaluation.batches = 4
  config.evaluation.sample_tokens = 20
  config.launch.restart_seconds = 0.2
  # A step of its own takes 3 ms; so one core carries several of these.
  config.throttle.step_seconds = 0.012
  return config
