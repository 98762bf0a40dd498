"""What do learners bring that are there for the middle of a run only?

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/scavenging.py

Two learners alone, and with 2 or 6 more (+100 %, +300 %) that join when a
quarter of the tokens is processed and leave when three quarters are. All runs
end at 2.5M merged tokens, so compare the virtual seconds until then, and the
losses. If everything were merged, it would take 0.75 and 0.62 of the time,
which is what the paper measured. 9 runs of 50 s: four minutes on two cores.
"""

from decoupled_diloco.lab import runs, study

TOKENS = 2.5e6
FIRST = 2  # Learners that are always there.
SECONDS = TOKENS / runs.SEQUENCES_PER_STEP / runs.SEQUENCE_LENGTH
WARMUP_STEPS = 48


def get_config():
  config = study.default_study('scavenging')
  config.run = runs.small_run()
  study.change(config.run, runs.merged_budget(TOKENS, FIRST))
  config.run.quorum.min_learners = FIRST
  config.run.cluster.evaluate_every_rounds = 50
  for more in (0, 2, 6):
    of_all = FIRST / (FIRST + more)
    joins = SECONDS / 4
    leaves = joins + SECONDS / 2 * of_all
    study.add(
      config,
      factors={'more learners': more},
      changes={
        'membership.num_learners': FIRST + more,
        # The schedule counts steps of all learners, which hold more tokens.
        'inner.warmup_steps': round(WARMUP_STEPS * of_all),
        'failures.schedule': tuple(
          (at, learner, kind)
          for learner in range(FIRST, FIRST + more)
          for at, kind in ((joins, 'join'), (leaves, 'leave'))
        ),
      },
    )
  config.reference = {'more learners': 0}
  config.plot.x = 'tokens'
  return config
