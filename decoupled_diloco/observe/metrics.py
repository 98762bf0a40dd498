"""A run as a table of figures over time: one flat JSON object a line.

Made for `pandas.read_json(path, lines=True)`. `RUN_FIELDS` and `LEARNER_FIELDS`
say what each name means, and in which unit; a figure that is not known yet is
null. Times are those of the syncer's clock.
"""

import json
import math
import os
from collections.abc import Mapping

from decoupled_diloco.observe import words
from decoupled_diloco.observe.appending import AppendedFile
from decoupled_diloco.observe.goodput import account, useful_tokens
from decoupled_diloco.observe.learner_status import LearnerStatus
from decoupled_diloco.observe.run_status import RunStatus

Figure = float | int | str | None

RUN_FIELDS: Mapping[str, str] = {
  'time_seconds': 'since the first event of the run',
  'elapsed_seconds': 'since round 0 was opened, up to the end of the run',
  'wall_seconds': 'the same up to the beginning of the drain',
  'phase': f'one of {", ".join(words.PHASES)}',
  'round': 'the round opened last, from 0; -1 before the first',
  'rounds_merged': 'rounds merged, those of the drain included',
  'goodput': 'useful_tokens / capacity_tokens',
  'yield': 'merged_tokens / processed_tokens',
  'useful_tokens': 'tokens in contributions that were or will be merged',
  'capacity_tokens': 'what the same hardware would have processed undisturbed',
  'merged_tokens': 'tokens merged, each fragment counting 1/P',
  'processed_tokens': 'tokens trained on, redone work included',
  'quorum_seconds': "last round's time from first contribution to quorum",
  'quorum_seconds_median': 'the same, median over the run',
  'grace_seconds': "last round's grace after the quorum, at most",
  'grace_seconds_median': 'the same, median over the run',
  'contributors': 'learners in the round merged last',
  'learners_connected': 'learners that are connected',
  'publications_in_flight': 'fragments not yet received by every learner',
  'bytes_up': 'payload bytes received from learners',
  'bytes_down': 'payload bytes sent to learners',
  'bits_up': 'bits per parameter and synchronisation, accepted contributions',
  'bits_down': 'bits per parameter and synchronisation, publications',
  'faults_survived': 'losses after which the lost one was there again',
  'refusals': 'refused contributions, all reasons together',
  'rejections': 'learners that were not admitted',
}

LEARNER_FIELDS: Mapping[str, str] = {
  'state': f'one of {", ".join(words.STATES)}',
  'incarnation': 'number of its present or last life; 0 if never admitted',
  'restarts': 'faults survived',
  'silent_seconds': 'since a message of it came last',
  'steps': 'inner steps since the run began',
  'tokens': 'tokens since the run began',
  'loss': 'mean training loss of its last scan, nats per token',
  'tokens_per_second': 'in its last scan; 0 while it is absent',
  'participation': 'share of merged rounds since its first admission',
  'participation_since_return': 'the same since its latest admission',
  'rounds_merged': 'rounds in which a contribution of it was merged',
  'staleness': 'versions, of its contribution merged last',
  'staleness_mean': 'versions, mean over its merged contributions',
  'weight_share': 'its mean share of the weight over all merged rounds',
  'useful_tokens': 'as for the run',
  'merged_tokens': 'as for the run',
  'processed_tokens': 'as for the run',
  'refusals': 'its refused contributions',
  'bytes_up': 'payload bytes received from it',
  'bytes_down': 'payload bytes sent to it',
}


class MetricsWriter:
  """Appends the figures of a run to a file, a line at a time.

  A process that goes on with an existing file appends; a line that a killed one
  has left unfinished is cut off.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Opens or makes the file.

    Raises:
      ValueError: if it is there and is another kind of file.
    """
    self._file = AppendedFile(path, begins=b'{"time_seconds":', ends=b'\n')

  def write(self, status: RunStatus) -> None:
    """Writes one line; meant to be called about once a second.

    Raises:
      OSError: if the disk does not take it.
    """
    line = json.dumps(
      run_figures(status), separators=(',', ':'), allow_nan=False
    )
    self._file.append(line.encode() + b'\n')

  def close(self) -> None:
    """Closes the file; a second time does nothing."""
    self._file.close()


def run_figures(status: RunStatus) -> dict[str, Figure]:
  """The figures of a run: `RUN_FIELDS`, then for every learner m `learner_m_`
  and each of `LEARNER_FIELDS`, then `refusals_` and each reason that occurred.
  """
  books = account(status)
  values: dict[str, Figure] = {
    'time_seconds': status.now - (status.began_at or 0.0),
    'elapsed_seconds': status.elapsed_seconds,
    'wall_seconds': status.wall_seconds,
    'phase': status.phase,
    'round': status.current_round,
    'rounds_merged': status.rounds_merged,
    'goodput': books.goodput,
    'yield': books.yield_,
    'useful_tokens': books.useful_tokens,
    'capacity_tokens': books.capacity_tokens,
    'merged_tokens': books.merged_tokens,
    'processed_tokens': books.processed_tokens,
    'quorum_seconds': status.quorum_seconds.last,
    'quorum_seconds_median': status.quorum_seconds.median,
    'grace_seconds': status.grace_seconds.last,
    'grace_seconds_median': status.grace_seconds.median,
    'contributors': len(status.contributors),
    'learners_connected': len(status.connected),
    'publications_in_flight': status.publications_in_flight,
    'bytes_up': status.bytes_up,
    'bytes_down': status.bytes_down,
    'bits_up': status.bits_up,
    'bits_down': status.bits_down,
    'faults_survived': len(status.faults),
    'refusals': sum(status.refusals.values()),
    'rejections': status.rejections,
  }
  for number, learner in status.learners.items():
    for name, value in _learner_figures(status, learner).items():
      values[f'learner_{number}_{name}'] = value
  for reason, count in sorted(status.refusals.items()):
    values[f'refusals_{reason}'] = count
  return {name: _finite(value) for name, value in values.items()}


def _learner_figures(
  status: RunStatus, learner: LearnerStatus
) -> dict[str, Figure]:
  seen = learner.last_seen
  return {
    'state': learner.state,
    'incarnation': learner.incarnation,
    'restarts': learner.restarts,
    'silent_seconds': None if seen is None else status.now - seen,
    'steps': learner.total_steps,
    'tokens': learner.total_tokens,
    'loss': learner.loss,
    'tokens_per_second': learner.tokens_per_second,
    'participation': learner.participation,
    'participation_since_return': learner.participation_since_return,
    'rounds_merged': learner.rounds_merged,
    'staleness': learner.staleness.last,
    'staleness_mean': learner.staleness_mean,
    'weight_share': status.weight_share(learner.learner),
    'useful_tokens': useful_tokens(status, learner.learner),
    'merged_tokens': learner.merged_tokens,
    'processed_tokens': learner.processed_tokens,
    'refusals': sum(learner.refusals.values()),
    'bytes_up': learner.bytes_up,
    'bytes_down': learner.bytes_down,
  }


def _finite(value: Figure) -> Figure:
  """JSON has no infinity and no NaN, which a training loss may become."""
  is_bad = isinstance(value, float) and not math.isfinite(value)
  return None if is_bad else value
