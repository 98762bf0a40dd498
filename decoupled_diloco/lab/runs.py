"""The runs that the studies vary."""

from typing import Any

from decoupled_diloco.lab import run_config

TOKENS_PER_BATCH = 8 * 128


def small_run() -> Any:
  """A byte transformer of 0.115M parameters on Python sources.

  Batches of 8 x 128 bytes per learner; H=24 in six fragments, four bits both
  ways. A learner takes 1 virtual second per inner step. Trained on 4.9M bytes
  it has seen 43 for each of its parameters; that takes a minute or two on one
  core, however many learners share them.
  """
  run = run_config.default_run()
  run.data.source = 'python'
  run.data.sequence_length = 128
  run.data.batch_size = 8
  run.model.width = 64
  run.model.layers = 2
  run.model.heads = 4
  run.model.kv_heads = 2
  run.schedule.sync_every = 24
  run.schedule.num_fragments = 6
  run.inner.learning_rate = 1.6e-2
  # For 25 to 50 outer steps per fragment; with momentum 0.9, which looks back
  # on ten, the end of so short a run lags behind its learners.
  run.outer.gain = 1.5
  run.outer.momentum = 0.7
  run.evaluation.batches = 64
  return run


def budget(
  tokens: float, M: int, *, steps_per_scan: int = 4
) -> dict[str, object]:
  """Changes that make M learners share so many tokens, in batches of 1,024.

  Args:
    tokens: of all learners together, if all take part in all rounds.
    M: number of learners.
    steps_per_scan: K = H / P.
  """
  rounds = round(tokens / (M * steps_per_scan * TOKENS_PER_BATCH))
  return {
    'membership.num_learners': M,
    'budget.rounds': rounds,
  }


def merged_budget(tokens: float, M: int) -> dict[str, object]:
  """Changes that make M learners train until so many tokens are *merged*.

  The learning rate decays over the tokens merged, too. So runs are comparable
  in which different shares of the work are lost.
  """
  return {
    'membership.num_learners': M,
    'budget.rounds': 0,
    'budget.merged_tokens': round(tokens),
  }
