"""Which outer optimizer? Gain and momentum, over H.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/outer.py

Four learners share 2.5M bytes of Python sources. The grid, and what the config
takes by itself where nothing is given: momentum from the number of outer steps,
and the gain that suits it. That one should be among the best for every H. 192
runs of half a minute. With --config.seeds='(0,)' a first look in a third of the
time.
"""

from decoupled_diloco.lab import runs, study

TOKENS = 2.5e6
P = 6


def get_config():
  config = study.default_study('outer')
  config.run = runs.small_run()
  config.run.cluster.mode = 'streaming'
  for H in (12, 24, 48, 96):
    _add(config, H, None, None)
    for momentum in (0.0, 0.5, 0.9):
      for gain in (1.0, 2.0, 3.0, 5.0, 7.0):
        _add(config, H, momentum, gain)
  config.reference.momentum = 'not given'
  config.reference_by = ('H',)
  config.plot.x = 'gain'
  config.plot.lines = 'momentum'
  config.plot.panels = 'H'
  return config


def _add(config, H, momentum, gain):
  study.add(
    config,
    factors={'H': H, 'momentum': 'not given'}
    if momentum is None
    else {'H': H, 'momentum': momentum, 'gain': gain},
    changes={
      **runs.budget(TOKENS, 4, steps_per_scan=H // P),
      'schedule.sync_every': H,
      'outer.momentum': momentum,
      'outer.gain': gain,
    },
  )
