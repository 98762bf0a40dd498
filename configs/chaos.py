"""Four paced learners, of which one is killed every ten seconds.

  scripts/run python -m decoupled_diloco.chaos --config=configs/chaos.py

A learner's step takes 0.2 s, of which its computation is a small part, as if an
accelerator did it: a dead learner then lends nobody its core, which would
flatter the figures.
"""

from decoupled_diloco.chaos import options


def get_config():
  config = options.default_config()
  config.faults.mean_seconds_between = 10.0

  run = config.run
  run.membership.num_learners = 4
  run.schedule.sync_every = 24
  run.schedule.num_fragments = 24
  run.budget.merged_tokens = 2_000_000
  run.outer.gain = 2.0
  run.outer.momentum = 0.7
  run.model.width = 64
  run.model.layers = 2
  run.model.heads = 4
  run.model.kv_heads = 2
  run.data.source = 'plays'
  run.data.sequence_length = 128
  run.data.batch_size = 4
  run.inner.learning_rate = 8e-3
  run.throttle.step_seconds = 0.2
  run.snapshots.every_seconds = 2.0
  return config
