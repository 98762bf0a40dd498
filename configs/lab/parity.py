"""Is the model as good? M learners against data parallelism at equal tokens.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/parity.py

Each run sees 4.9M bytes of Python sources, 43 for each of its 0.115M
parameters. Data parallelism has the same M batches in every step and an exact
all-reduce; its learning rate is the best of three for every M. The decoupled
learners have one preset for all M.

Two hours on two cores (an estimate). The published gaps for 35M parameters are
0 / 0.7 / 2.0 / 3.9 % for M = 1, 2, 4, 8 (Charles et al., arXiv 2503.09799).
"""

from decoupled_diloco.lab import runs, study

TOKENS = 4.9e6
RATES = (8e-3, 1.2e-2, 1.8e-2)


def get_config():
  config = study.default_study('parity')
  config.run = runs.small_run()
  for M in (1, 2, 4, 8):
    for method in ('data_parallel', 'streaming', 'decoupled'):
      for rate in RATES:
        study.add(
          config,
          factors={'method': method, 'M': M},
          choice={'inner lr': rate},
          changes={
            **runs.budget(TOKENS, M),
            'cluster.mode': method,
            'inner.learning_rate': rate,
          },
        )
  config.reference.method = 'data_parallel'
  config.reference_by = ('M',)
  config.plot.x = 'M'
  config.plot.lines = 'method'
  config.plot.log_x = True
  return config
