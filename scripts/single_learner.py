"""What one learner reaches alone in the steps that a run takes.

  scripts/run python scripts/single_learner.py --rates=0.004,0.008,0.016

trains the model of a config (the quickstart's, or --config=...) without a
syncer, on the whole text, for as many inner steps as the fastest learner of the
run takes, once for each learning rate, and prints the held-out losses: what the
run's global model has to beat.
"""

import dataclasses

import jax
from absl import app, flags
from ml_collections import config_flags

from decoupled_diloco import configuring, data, entry, roles
from decoupled_diloco.training import evaluation

_CONFIG = config_flags.DEFINE_config_file('config', 'configs/quickstart.py')
_RATES = flags.DEFINE_list(
  'rates', ['0.004', '0.008', '0.016'], 'Inner learning rates.'
)


def main(argv: list[str]) -> None:
  del argv
  entry.prepare_jax()
  options = configuring.options_of(_CONFIG.value)
  options = roles.fitted_to_data(
    dataclasses.replace(
      options, learner=0, data=dataclasses.replace(options.data, num_shards=1)
    )
  )
  held_out = data.held_out_batches(options.data, options.evaluation.batches)
  steps = options.budget.steps(options.schedule)
  best = None
  for rate in map(float, _RATES.value):
    inner_options = dataclasses.replace(options.inner, learning_rate=rate)
    setup = roles.set_up_learner(
      dataclasses.replace(options, inner=inner_options)
    )
    state = setup.trainer.init_state(jax.random.key(options.seed))
    batches = setup.open_batches(0)
    for step in range(0, steps, options.schedule.steps_per_scan):
      state, _ = setup.trainer.scan(state, next(batches), step)
    batches.close()
    loss = evaluation.held_out_loss(
      setup.task,
      state.params,
      ({'tokens': tokens} for tokens in held_out['tokens']),
    )
    print(f'learning rate {rate:g}: held-out loss {loss:.4f}', flush=True)
    best = loss if best is None else min(best, loss)
  print(f'best of one learner alone, {steps} steps: {best:.4f}')


if __name__ == '__main__':
  app.run(main)
