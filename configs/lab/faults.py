"""What do faults cost? Lost contributions, deaths, a long absence.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/faults.py

Four learners train until 2.5M tokens are merged, however much of their work is
lost. A scan takes 4 virtual seconds. 'Chaos' kills each learner every 100
seconds on average, for 10 seconds on average. The target is a loss at most 1 %
higher at equal merged tokens. 18 runs of about 45 s: seven minutes
on two cores.
"""

from decoupled_diloco.lab import runs, study


def get_config():
  config = study.default_study('faults')
  config.run = runs.small_run()
  study.change(config.run, runs.merged_budget(2.5e6, 4))
  for fault, changes in {
    'none': {},
    '30 % lost': {'link.loss': 0.3, 'link.on_loss': 'dropped'},
    '50 % lost': {'link.loss': 0.5, 'link.on_loss': 'dropped'},
    'chaos': {
      'failures.mean_seconds_between': 100.0,
      'failures.mean_repair_seconds': 10.0,
    },
    'chaos, snapshots': {
      'failures.mean_seconds_between': 100.0,
      'failures.mean_repair_seconds': 10.0,
      'cluster.snapshot_every_scans': 5,
    },
    'one away for a third': {'failures.schedule': ((200.0, 3, 'kill', 200.0),)},
  }.items():
    study.add(config, factors={'fault': fault}, changes=changes)
  config.reference.fault = 'none'
  return config
