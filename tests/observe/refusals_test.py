"""Whatever is refused is counted, by its reason, for whoever has sent it."""

from decoupled_diloco.observe.status import init, update
from decoupled_diloco.observe.summary import summarise
from decoupled_diloco.observe.summary_text import to_text
from decoupled_diloco.observe.tape_lines import TapeHeader
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol.messages import Reason
from decoupled_diloco.protocol.weights import StalenessOptions
from tests.protocol.scripts import SOUND, SyncerScript


def script():
  """Round 0 is over without learner 2, round 1 in its grace, 2 is current."""
  syncer = SyncerScript(
    M=3, joined=3, rounds=20, staleness=StalenessOptions(max_staleness=0)
  )
  syncer.contribute(0, 0)
  syncer.contribute(1, 0)
  syncer.contribute(0, 1)
  syncer.wait(60.0)  # The cap of the grace.
  syncer.done(0)
  syncer.contribute(0, 2)
  return syncer


def test_every_reason_is_counted():
  syncer = script()
  bad = [
    (Reason.LATE, 0, SOUND, {}),
    (Reason.FENCED, 2, SOUND, {'incarnation': 77}),
    (Reason.UNKNOWN_ROUND, 99, SOUND, {}),
    (Reason.WRONG_FRAGMENT, 2, SOUND, {'fragment': 4}),
    (Reason.STALE, 2, SOUND, {'base_version': 1}),
    (Reason.EMPTY, 2, SOUND, {'tokens': 0}),
    (Reason.CORRUPT, 2, ev.PayloadFacts(8, is_intact=False), {}),
    (Reason.NOT_FINITE, 2, ev.PayloadFacts(8, norm=None), {}),
    (
      Reason.WRONG_LAYOUT,
      2,
      ev.PayloadFacts(8, norm=None, fits_layout=False),
      {},
    ),
  ]
  for _, round_, payload, fields in bad:
    syncer.contribute(2, round_, payload, **fields)
  syncer.contribute(2, 2)
  syncer.contribute(2, 2)  # Once more: a duplicate.
  expected = {reason.value: 1 for reason, *_ in bad} | {'duplicate': 1}
  # The others follow from how a round, or the run, ends: see `protocol/`.
  assert {reason.value for reason in Reason} - set(expected) == {
    'no_quorum',
    'outlier',
    'draining',
  }
  P = syncer.options.schedule.num_fragments
  status = init(TapeHeader.of('syncer', syncer.options, (1,) * P))
  for event, effects in syncer.tape:
    update(status, event, effects)
  summary = summarise(status)
  assert summary.learners[2].refusals == expected
  assert not summary.learners[0].refusals
  assert summary.refusals == expected
  text = to_text(summary, 300)  # In one line.
  for reason in expected:
    assert f'1 {reason}' in text
