"""Which outer optimizer? Gain and momentum, over H.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/outer.py

Four learners share 2.5M bytes of Python sources. 180 runs of half a minute.
With --config.seeds='(0,)' a first look in a third of the time.
"""

from decoupled_diloco.lab import runs, study

TOKENS = 2.5e6
P = 6


def get_config():
  config = study.default_study('outer')
  config.run = runs.small_run()
  config.run.cluster.mode = 'streaming'
  for H in (12, 24, 48, 96):
    for momentum in (0.0, 0.5, 0.9):
      for gain in (1.0, 2.0, 3.0, 5.0, 7.0):
        study.add(
          config,
          factors={'H': H, 'momentum': momentum, 'gain': gain},
          changes={
            **runs.budget(TOKENS, 4, steps_per_scan=H // P),
            'schedule.sync_every': H,
            'outer.momentum': momentum,
            'outer.gain': gain,
          },
        )
  config.plot.x = 'gain'
  config.plot.lines = 'H'
  return config
