"""The runs that the studies vary."""

from typing import Any

from decoupled_diloco.lab import run_config

SEQUENCE_LENGTH = 128
# Sequences in an inner step of all learners together, however many they are.
SEQUENCES_PER_STEP = 16


def small_run() -> Any:
  """A byte transformer of 0.115M parameters on Python sources.

  Batches of 4 x 128 bytes per learner; H=24 in six fragments, four bits both
  ways. A learner takes 1 virtual second per inner step. Trained on 2.5M bytes
  it has seen 21 for each of its parameters; that takes half a minute to a
  minute on one core, however many learners share them.
  """
  run = run_config.default_run()
  run.data.source = 'python'
  run.data.sequence_length = SEQUENCE_LENGTH
  run.data.batch_size = 4
  run.model.width = 64
  run.model.layers = 2
  run.model.heads = 4
  run.model.kv_heads = 2
  run.schedule.sync_every = 24
  run.schedule.num_fragments = 6
  run.inner.learning_rate = 8e-3
  # A learner's momentum goes on pushing its own way after it has adopted.
  run.inner.b1 = 0.7
  # For 50 to 100 outer steps per fragment; with momentum 0.9, which looks back
  # on ten, the end of so short a run lags behind its learners.
  run.outer.gain = 2.5
  run.outer.momentum = 0.8
  run.outer.embedding_merge = 'rda'
  # As published; the study of adoption says what the default makes of it.
  run.adopt.rule = 'overwrite'
  run.evaluation.batches = 256
  return run


def budget(
  tokens: float, M: int, *, steps_per_scan: int = 4
) -> dict[str, object]:
  """Changes that make M learners share so many tokens.

  The batch of all of them together is the same for every M, and so is the
  number of inner steps.

  Args:
    tokens: of all learners together, if all take part in all rounds.
    M: number of learners, a divisor of `SEQUENCES_PER_STEP`.
    steps_per_scan: K = H / P.
  """
  steps = tokens / (SEQUENCES_PER_STEP * SEQUENCE_LENGTH)
  return {
    **_share(M),
    'budget.rounds': round(steps / steps_per_scan),
  }


def merged_budget(tokens: float, M: int) -> dict[str, object]:
  """The same, but the run ends when so many tokens are *merged*.

  The learning rate decays over the tokens merged, too. So runs are comparable
  in which different shares of the work are lost.
  """
  return {
    **_share(M),
    'budget.rounds': 0,
    'budget.merged_tokens': round(tokens),
  }


def _share(M: int) -> dict[str, object]:
  return {
    'membership.num_learners': M,
    'data.batch_size': SEQUENCES_PER_STEP // M,
    # The held-out text is the same, too.
    'evaluation.batches': 64 * M,
  }
