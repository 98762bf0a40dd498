"""Is the model as good? M learners against data parallelism at equal tokens.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/parity.py

Each run sees 4.9M bytes of Python sources, 43 for each of its 0.115M
parameters, in 2,400 steps of 16 sequences, which M learners share: with 8,
each has batches of two. So data parallelism is the same for every M; its
learning rate is the best of three. The learners have one preset for all M:
'streaming' waits for all and adopts at once; 'decoupled' never waits, and
adopts a scan later.

The published gaps for 35M parameters are 0 / 0.7 / 2.0 / 3.9 % for M = 1, 2, 4,
8, also at one batch for all M (Charles et al., arXiv 2503.09799). 33 runs of 70
to 90 s.
"""

from decoupled_diloco.lab import runs, study

TOKENS = 4.9e6


def get_config():
  config = study.default_study('parity')
  config.run = runs.small_run()
  for rate in (5e-3, 8e-3, 1.2e-2):
    study.add(
      config,
      factors={'method': 'data parallelism'},
      choice={'inner lr': rate},
      changes={
        **runs.budget(TOKENS, 1),
        'cluster.mode': 'data_parallel',
        'inner.learning_rate': rate,
      },
    )
  for method in ('streaming', 'decoupled'):
    for M in (1, 2, 4, 8):
      study.add(
        config,
        factors={'method': method, 'M': M},
        choice={'inner lr': config.run.inner.learning_rate},
        changes={**runs.budget(TOKENS, M), 'cluster.mode': method},
      )
  config.reference.method = 'data parallelism'
  config.plot.x = 'M'
  config.plot.lines = 'method'
  config.plot.log_x = True
  return config
