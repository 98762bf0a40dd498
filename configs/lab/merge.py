"""Which merge rule? The mean against RDA, with and without embeddings, over M.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/merge.py

Near-orthogonal deltas shrink in the mean, so each rule has the best of three
gains for every M. Batches of four sequences per learner and 600 steps, so that
more learners see more text. 81 runs of 15 s to two minutes.
"""

from decoupled_diloco.lab import runs, study

RULES = {
  'mean': ('mean', 'mean'),
  'RDA, embeddings averaged': ('rda', 'mean'),
  'RDA': ('rda', 'rda'),
}


def get_config():
  config = study.default_study('merge')
  config.run = runs.small_run()
  config.run.budget.rounds = 150
  config.run.cluster.mode = 'streaming'
  config.run.outer.momentum = 0.7
  for M in (4, 8, 16):
    for rule, (merge, embedding_merge) in RULES.items():
      for gain in (1.5, 2.5, 4.0):
        study.add(
          config,
          factors={'M': M, 'merge': rule},
          choice={'gain': gain},
          changes={
            'membership.num_learners': M,
            'outer.merge': merge,
            'outer.embedding_merge': embedding_merge,
            'outer.gain': gain,
          },
        )
  config.reference.merge = 'mean'
  config.reference_by = ('M',)
  config.plot.x = 'M'
  config.plot.lines = 'merge'
  config.plot.log_x = True
  return config
