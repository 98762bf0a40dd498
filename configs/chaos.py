"""Paced learners that are killed: what becomes of goodput, yield and the loss.

  scripts/run python -m decoupled_diloco.chaos --config=configs/chaos.py:4
  scripts/run python -m decoupled_diloco.chaos --config=configs/chaos.py:8

Four or eight learners, of which one is killed every 15 or 45 seconds in the
mean. (Those rates are not yet the ones at which the synchronous baseline falls
to about 27 % goodput: that takes more kills than these.) A learner's step takes
0.2 or 0.4 s, of which its computation is a small part, as if an accelerator did
it: a dead learner then lends nobody its core, which would flatter the figures.
Each of the three runs takes about four minutes;
--config.run.adopt.rule=overwrite gives the published rule (with a
--config.workdir of its own).
"""

from decoupled_diloco.chaos import options, runs

# Mean seconds between two kills, and the time of a step, by the number of
# learners: eight of them need more of the two cores.
MEAN_SECONDS = {'4': 15.0, '8': 45.0}
STEP_SECONDS = {'4': 0.2, '8': 0.4}


def get_config(learners='4'):
  config = options.default_config()
  config.workdir = f'runs/chaos/{learners}'
  config.faults.mean_seconds_between = MEAN_SECONDS.get(learners, 15.0)

  runs.make_paced(
    config.run,
    num_learners=int(learners),
    step_seconds=STEP_SECONDS.get(learners, 0.2),
  )
  config.run.budget.merged_tokens = 1_600_000
  config.run.snapshots.every_seconds = 2.0
  return config
