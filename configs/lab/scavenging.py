"""What do learners bring that are there for the middle of a run only?

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/scavenging.py

Two learners train for 600 rounds; 2 or 6 more (+100 %, +300 %) join after a
quarter and leave after three quarters. Compare the losses over virtual time in
results.jsonl (`timeline`). Published, wall time to the same loss: 0.75 and
0.62. 9 runs of up to three minutes: a quarter of an hour on two
cores (an estimate).
"""

from decoupled_diloco.lab import runs, study

ROUNDS = 600
SECONDS = ROUNDS * 4.0


def get_config():
  config = study.default_study('scavenging')
  config.run = runs.small_run()
  config.run.budget.rounds = ROUNDS
  config.run.cluster.evaluate_every_rounds = 25
  for more in (0, 2, 6):
    visits = [
      fault
      for learner in range(2, 2 + more)
      for fault in (
        (SECONDS / 4, learner, 'join'),
        (SECONDS * 3 / 4, learner, 'leave'),
      )
    ]
    study.add(
      config,
      factors={'more learners': more},
      changes={
        'membership.num_learners': 2 + more,
        'quorum.min_learners': 2,
        'failures.schedule': tuple(visits),
      },
    )
  config.reference = {'more learners': 0}
  config.plot.x = 'tokens'
  return config
