"""Half of the learners 18 % faster: who sets the pace?

  scripts/run python -m decoupled_diloco.lab \\
      --config=configs/lab/mixed_hardware.py

Eight learners, half of them 18 % slower, 10 % variation of scan times: all must
take part (K_min=8); whoever comes first (K_min=1); whoever comes first, with
grace. The third should have the goodput of the second and the loss of the
first. Published: K=8 goodput 84, K=1 100, K=1 with grace 100. Each run ends
when 4.9M tokens are merged. 9 runs of two minutes: ten minutes on two
cores.
"""

from decoupled_diloco.lab import runs, study

M = 8


def get_config():
  config = study.default_study('mixed_hardware')
  config.run = runs.small_run()
  study.change(config.run, runs.merged_budget(4.9e6, M))
  config.run.speed.variation = 0.1
  config.run.link.latency_seconds = 0.4
  config.run.learners = {
    str(m): {'speed': {'step_seconds': 1.18}} for m in range(M // 2, M)
  }
  for policy, minimum, gamma in (
    ('K_min=8', 8, 0.0),
    ('K_min=1', 1, 0.0),
    ('K_min=1 with grace', 1, 0.9),
  ):
    study.add(
      config,
      factors={'policy': policy},
      changes={'quorum.min_learners': minimum, 'grace.gamma': gamma},
    )
  config.reference.policy = 'K_min=8'
  return config
