"""How few bits? Codecs up and down, with and without error feedback.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/wire.py

Four learners share 2.5M bytes of Python sources. 51 runs of 40 s: 17
minutes on two cores. The target is four bits both ways within 0.1 % of f32.
Published: int4 +0.09 %, 2 bits +32 % (up only, no error feedback).
"""

from decoupled_diloco.lab import runs, study

TOKENS = 2.5e6


def get_config():
  config = study.default_study('wire')
  config.run = runs.small_run()
  study.change(config.run, runs.budget(TOKENS, 4))
  config.run.cluster.mode = 'streaming'
  for up in ('f32', 'bf16', 'int8', 'int4', 'e3m0', 'int2'):
    for feedback in (
      (False, True) if up in ('int4', 'e3m0', 'int2') else (False,)
    ):
      _add(config, up, feedback, 'f32', False)
  for codec in ('bf16', 'int8', 'int4', 'e3m0', 'int2'):
    _add(config, codec, codec in ('int4', 'e3m0', 'int2'), codec, True)
  for codec in ('int4', 'e3m0', 'int2'):
    _add(config, codec, False, codec, True)
  config.reference = {
    'up': 'f32',
    'feedback up': False,
    'down': 'f32',
    'feedback down': False,
  }
  return config


def _add(config, up, up_feedback, down, down_feedback):
  study.add(
    config,
    factors={
      'up': up,
      'feedback up': up_feedback,
      'down': down,
      'feedback down': down_feedback,
    },
    changes={
      'wire.up': up,
      'wire.up_error_feedback': up_feedback,
      'wire.down': down,
      'wire.down_error_feedback': down_feedback,
    },
  )
