"""Must learners read the same kind of text? Mixed, and one topic each.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/data.py

Four learners share 2.5M bytes: all of them Shakespeare's plays and Python
sources, or two of them the one and two the other. The held-out text is both.
12 runs of 35 s: four minutes on two cores.
"""

from decoupled_diloco.lab import runs, study

BOTH = ('plays', 'python')


def get_config():
  config = study.default_study('data')
  config.run = runs.small_run()
  study.change(config.run, runs.budget(2.5e6, 4))
  study.change(config.run, {'data.source': BOTH})
  for text, sources in (
    ('mixed', (BOTH,) * 4),
    ('one topic each', ('plays', 'plays', 'python', 'python')),
  ):
    for method in ('data_parallel', 'decoupled'):
      study.add(
        config,
        factors={'text': text, 'method': method},
        changes={
          'cluster.mode': method,
          'learners': {
            str(m): {'data': {'source': source}}
            for m, source in enumerate(sources)
          },
        },
      )
  config.reference.text = 'mixed'
  config.reference_by = ('method',)
  return config
