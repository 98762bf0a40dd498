"""Three learners of unequal speed learn Shakespeare, and one of them is killed.

  scripts/run python -m decoupled_diloco.train --config=configs/quickstart.py

A byte-level transformer of 0.11M parameters; a syncer and three learners as
processes of one machine with two cores. The learners' steps are paced to 16,
17.6 and 19.2 ms, of which the computation takes about half, so that they stand
for accelerators of different speed that do not lend each other their cores. At
40 % of the run learner 2 is killed with SIGKILL, started again, and contributes
again.

Expected, in two to three minutes on two cores: held-out loss of the global
model from 6.1 to 1.41 ... 1.45 nats per byte (one learner alone reaches 1.48 in
as many steps: scripts/single_learner.py), goodput about 0.9, yield above 0.99,
4.09 bits per parameter and synchronisation up and 4.06 down.
"""

from decoupled_diloco import configuring


def get_config():
  config = configuring.default_config()
  config.workdir = 'runs/quickstart'

  config.membership.num_learners = 3
  config.schedule.sync_every = 24
  config.schedule.num_fragments = 6
  config.budget.rounds = 1200

  # What suits this H and a run of some thousand steps: a learning rate of 0.6.
  config.outer.gain = 2.0
  config.outer.momentum = 0.7

  config.model.width = 64
  config.model.layers = 2
  config.model.heads = 4
  config.model.kv_heads = 2
  config.data.source = 'plays'
  config.data.sequence_length = 128
  config.data.batch_size = 4
  config.inner.learning_rate = 8e-3

  config.learners = {
    '0': {'throttle': {'step_seconds': 0.0160}},
    '1': {'throttle': {'step_seconds': 0.0176}},
    '2': {'throttle': {'step_seconds': 0.0192}},
  }
  # So that the one that is killed has one to go on from.
  config.snapshots.every_seconds = 10.0
  config.launch.kill = ((2, 0.4),)
  return config
