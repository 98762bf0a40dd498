"""Other models than a dense transformer: experts, and vision.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/models.py

Four learners against data parallelism at equal tokens, each with the best of
three learning rates: a byte transformer whose layers have four experts, two of
them for each byte; and a small vision transformer on handwritten digits, moved
by a pixel, 22 times each. The loss of digits is in nats per image.
"""

from decoupled_diloco.lab import runs, study

M = 4


def get_config():
  config = study.default_study('models')
  config.run = runs.small_run()
  config.run.vit.width = 32
  config.run.vit.layers = 2
  config.run.vit.heads = 4
  config.run.vit.kv_heads = 4
  config.run.images.batch_size = 8
  config.run.images.shift_pixels = 1
  experts = {
    **runs.budget(2.5e6, M),
    'model.num_experts': 4,
    'model.experts_per_token': 2,
  }
  digits = {
    'task': 'image',
    'membership.num_learners': M,
    'budget.rounds': 250,
    # All 352 that fill batches of 8.
    'evaluation.batches': 44,
  }
  for model, changes, rates in (
    ('experts', experts, (8e-3, 1.2e-2, 1.8e-2)),
    ('digits', digits, (2e-3, 4e-3, 8e-3)),
  ):
    for method in ('data_parallel', 'decoupled'):
      for rate in rates:
        study.add(
          config,
          factors={'model': model, 'method': method},
          choice={'inner lr': rate},
          changes={
            **changes,
            'cluster.mode': method,
            'inner.learning_rate': rate,
          },
        )
  config.reference.method = 'data_parallel'
  config.reference_by = ('model',)
  return config
