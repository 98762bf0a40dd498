"""Three learners of unequal speed learn Shakespeare, and one of them is killed.

scripts/run python -m decoupled_diloco.train --config=configs/quickstart.py
"""

from decoupled_diloco import configuring


def get_config():
  config = configuring.default_config()
  config.workdir = 'runs/quickstart'

  config.membership.num_learners = 3
  config.schedule.sync_every = 24
  config.schedule.num_fragments = 6
  config.budget.rounds = 420

  config.outer.learning_rate = 0.3
  config.outer.momentum = 0.9

  config.model.width = 64
  config.model.layers = 2
  config.data.source = 'plays'
  config.data.sequence_length = 128
  config.data.batch_size = 8
  config.inner.learning_rate = 5e-3

  config.learners = {
    '0': {'pace': {'step_seconds': 0.030}},
    '1': {'pace': {'step_seconds': 0.036}},
    '2': {'pace': {'step_seconds': 0.042}},
  }
  config.launch.kill = ((2, 0.4),)
  return config
