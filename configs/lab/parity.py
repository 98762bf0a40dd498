"""Is the model as good? M learners against data parallelism at equal tokens.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/parity.py

Each run sees 4.9M bytes of Python sources, 43 for each of its 0.115M
parameters, in 2,400 steps of 16 sequences, which M learners share: with 8,
each has batches of two. So data parallelism is the same for every M; its
learning rate and Adam's b1 are the best of six. The learners have one preset
for all M: 'streaming' waits for all and adopts at once; 'decoupled' never
waits, and adopts a scan later, which with 24 fragments is one step.

The published gaps for 35M parameters are 0 / 0.7 / 2.0 / 3.9 % for M = 1, 2, 4,
8, also at one batch for all M (Charles et al., arXiv 2503.09799). 42 runs of 70
to 110 s: half an hour on two cores.
"""

from decoupled_diloco.lab import runs, study

TOKENS = 4.9e6


def get_config():
  config = study.default_study('parity')
  config.run = runs.small_run()
  inner = config.run.inner
  for rate, b1 in (
    (5e-3, 0.9),
    (8e-3, 0.9),
    (1.2e-2, 0.9),
    (1.6e-2, 0.9),
    (8e-3, 0.8),
    (1.2e-2, 0.8),
  ):
    study.add(
      config,
      factors={'method': 'data parallelism'},
      choice={'inner lr': rate, 'b1': b1},
      changes={
        **runs.budget(TOKENS, 1),
        'cluster.mode': 'data_parallel',
        'inner.learning_rate': rate,
        'inner.b1': b1,
      },
    )
  for method, P in (('streaming', 6), ('decoupled', 24)):
    for M in (1, 2, 4, 8):
      study.add(
        config,
        factors={'method': method, 'M': M},
        choice={'inner lr': inner.learning_rate, 'b1': inner.b1},
        changes={
          **runs.budget(TOKENS, M, steps_per_scan=24 // P),
          'schedule.num_fragments': P,
          'cluster.mode': method,
        },
      )
  config.reference.method = 'data parallelism'
  config.plot.x = 'M'
  config.plot.lines = 'method'
  config.plot.log_x = True
  return config
