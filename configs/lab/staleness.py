"""Where does staleness start to hurt? One of four learners far away.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/staleness.py

What is published reaches learner 3 late, by 0 to 16 rounds, so that its deltas
start from old versions; with and without a discount for each version that it
has missed. 36 runs of about 40 s.
"""

from decoupled_diloco.lab import runs, study

SCAN_SECONDS = 4.0


def get_config():
  config = study.default_study('staleness')
  config.run = runs.small_run()
  study.change(config.run, runs.budget(2.5e6, 4))
  for rounds in (0, 1, 2, 4, 8, 16):
    for discount in (1.0, 0.7):
      study.add(
        config,
        factors={'rounds late': rounds, 'discount': discount},
        changes={
          'learners': {
            '3': {'link': {'down_latency_seconds': rounds * SCAN_SECONDS}}
          },
          'staleness.staleness_discount': discount,
          'staleness.max_staleness': 20,
          'lead.max_rounds_in_flight': 20,
          # Otherwise it would count as absent.
          'membership.liveness_timeout_seconds': 200.0,
        },
      )
  config.reference = {'rounds late': 0, 'discount': 1.0}
  config.plot.x = 'rounds late'
  config.plot.lines = 'discount'
  return config
