"""What to do with a newer version? Three rules, over lateness and loss.

  scripts/run python -m decoupled_diloco.lab --config=configs/lab/adoption.py

Four learners share 2.5M bytes; the result of a hand-over is adopted at once, or
their links take so long that this is 1, 2, 4 or 8 scans later, or a share of
the contributions is lost, or two of them are half as fast. All runs have as
many rounds, so about as much time and as many processed tokens: what a rule
throws away, its model does not get. 81 runs of about half a minute.
"""

from decoupled_diloco.lab import runs, study

TOKENS = 2.5e6
SCAN_SECONDS = 4.0
RULES = (('overwrite', 0.0), ('mix', 0.5), ('rebase', 0.0))


def get_config():
  config = study.default_study('adoption')
  config.run = runs.small_run()
  study.change(config.run, runs.budget(TOKENS, 4))
  for rule, alpha in RULES:
    _add_at_once(config, rule, alpha)
    for scans in (1, 2, 4, 8):
      _add(config, rule, alpha, scans, 0.0)
    for loss in (0.1, 0.3, 0.5):
      _add(config, rule, alpha, 1, loss)
    _add_unequal(config, rule, alpha)
  config.reference.rule = 'overwrite'
  config.reference_by = ('scans late', 'lost', 'half as fast')
  config.plot.x = 'scans late'
  config.plot.lines = 'rule'
  return config


def _add_at_once(config, rule, alpha):
  study.add(
    config,
    factors={'rule': rule, 'scans late': 0, 'lost': 0.0},
    changes={
      **_rule(rule, alpha),
      'cluster.mode': 'streaming',
    },
  )


def _add_unequal(config, rule, alpha):
  study.add(
    config,
    factors={'rule': rule, 'scans late': 1, 'lost': 0.0, 'half as fast': 2},
    changes={
      **_rule(rule, alpha),
      'learners': {str(m): {'speed': {'step_seconds': 2.0}} for m in (2, 3)},
      'speed.variation': 0.1,
      'link.latency_seconds': 0.5 * SCAN_SECONDS / 2,
    },
  )


def _add(config, rule, alpha, scans, loss):
  study.add(
    config,
    factors={'rule': rule, 'scans late': scans, 'lost': loss},
    changes={
      **_rule(rule, alpha),
      # There and back again within that many scans.
      'link.latency_seconds': (scans - 0.5) * SCAN_SECONDS / 2,
      'link.loss': loss,
      'link.on_loss': 'dropped',
      'lead.max_rounds_in_flight': 12,
      'grace.overlap_scans': scans,
      # Otherwise who answers so late would count as absent.
      'membership.liveness_timeout_seconds': 100.0,
    },
  )


def _rule(rule, alpha):
  return {'adopt.rule': rule, 'adopt.alpha': alpha}
