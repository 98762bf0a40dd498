"""Which merge rule? The mean against RDA, over M.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/merge.py

Near-orthogonal deltas shrink in the mean, so each rule has the better of two
gains for every M. 600 steps per learner. 36 runs: half an
hour on two cores (an estimate).
"""

from decoupled_diloco.lab import runs, study


def get_config():
  config = study.default_study('merge')
  config.run = runs.small_run()
  config.run.budget.rounds = 150
  config.run.cluster.mode = 'streaming'
  for M in (4, 8, 16):
    for rule in ('mean', 'rda'):
      for gain in (1.0, 2.0):
        study.add(
          config,
          factors={'merge': rule, 'M': M},
          choice={'gain': gain},
          changes={
            'membership.num_learners': M,
            'outer.merge': rule,
            'outer.gain': gain,
          },
        )
  config.reference.merge = 'mean'
  config.reference_by = ('M',)
  config.plot.x = 'M'
  config.plot.lines = 'merge'
  config.plot.log_x = True
  return config
