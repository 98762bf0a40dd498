"""A run of a tiny model on a tiny text, for tests of what is built of it."""

import pathlib

from decoupled_diloco import configuring
from decoupled_diloco.run_options import RunOptions


def tiny_options(folder: pathlib.Path) -> RunOptions:
  """The options of a run of two learners; its text is written to the folder."""
  text = folder / 'text.txt'
  text.write_text('to be or not to be, ' * 200)
  config = configuring.default_config()
  config.workdir = str(folder / 'run')
  config.budget.rounds = 100
  config.membership.num_learners = 2
  config.schedule.sync_every, config.schedule.num_fragments = 4, 2
  config.model.width, config.model.layers = 16, 1
  config.model.heads = config.model.kv_heads = 2
  config.data.source = str(text)
  config.data.sequence_length, config.data.batch_size = 16, 2
  config.data.held_out_fraction = 0.2
  config.evaluation.batches = 2
  return configuring.options_of(config)
