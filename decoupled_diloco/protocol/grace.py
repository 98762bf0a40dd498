"""How long to wait, after the quorum, for contributions that cost nothing.

A learner that handed a fragment over goes on training for an overlap of tau
inner steps. What is left of that time once the quorum, the merge and the
network have had theirs is free: contributions that come in it are merged
without any learner losing a token (arXiv 2604.21428, adaptive grace window):

  grace = clip(gamma * (tau * xi_step - xi_quorum - xi_sync), 0, cap)

Where learners train on whatever happens, a round's grace begins only when K_min
of them have come back with the next round (see `quorum`). That scan is not part
of xi_quorum: it costs them nothing, and without it a learner behind a slow link
would have its hand-overs refused as late.

The first contributions of a run tell how long an inner step takes, but until a
first round is published nobody knows xi_sync: it counts as nothing then. The
cap alone would be a poor guess, for scans of any length.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple


@dataclasses.dataclass(frozen=True, slots=True)
class GraceOptions:
  """How much of the free time is used.

  Attributes:
    gamma: share of the free time, from 0 (no grace) to 1.
    overlap_scans: tau in scans; tau = overlap_scans * K inner steps. Learners
      that wait for each round have no overlap: there it says how much of
      a scan they may wait for one another.
    cap_seconds: never wait longer than this.
    decay: share of the past in the moving averages.
  """

  gamma: float = 0.9
  overlap_scans: float = 2.0
  cap_seconds: float = 10.0
  decay: float = 0.8

  def __post_init__(self):
    if not 0 <= self.gamma <= 1:
      raise ValueError(f'gamma={self.gamma} must be in [0, 1]; 0: no grace.')
    if self.overlap_scans < 0:
      raise ValueError(
        f'overlap_scans={self.overlap_scans} must not be negative.'
      )
    if self.cap_seconds < 0:
      raise ValueError(f'cap_seconds={self.cap_seconds} must not be negative.')
    if not 0 <= self.decay < 1:
      raise ValueError(
        f'decay={self.decay} must be in [0, 1); 0 keeps only the last value.'
      )


class GraceState(NamedTuple):
  """Moving averages, in seconds.

  Attributes:
    step_seconds: per learner, of an inner step.
    sync_seconds: of what follows a round's end: merge, publication and the
      network both ways; None before the first.
  """

  step_seconds: Mapping[int, float]
  sync_seconds: float | None


class GraceDecision(NamedTuple):
  """How much grace, and why."""

  seconds: float
  reason: str


def init() -> GraceState:
  """Nothing is known yet."""
  return GraceState(step_seconds={}, sync_seconds=None)


def observe_step(
  options: GraceOptions, state: GraceState, learner: int, seconds: float
) -> GraceState:
  """Takes in the mean time of an inner step in a learner's last scan."""
  old = state.step_seconds.get(learner)
  new = _average(options, old, seconds)
  return state._replace(step_seconds={**state.step_seconds, learner: new})


def observe_sync(
  options: GraceOptions, state: GraceState, seconds: float
) -> GraceState:
  """Takes in the time from a round's end to a learner's receipt of it."""
  return state._replace(
    sync_seconds=_average(options, state.sync_seconds, seconds)
  )


def window(
  options: GraceOptions,
  state: GraceState,
  *,
  steps_per_scan: int,
  quorum_seconds: float,
  learners: Iterable[int],
) -> GraceDecision:
  """The grace of a round that has just reached its quorum.

  The step time is that of the fastest of `learners`: it is the first whose
  overlap runs out.

  Args:
    options: gamma, tau, the cap.
    state: the moving averages.
    steps_per_scan: K.
    quorum_seconds: from the round's first contribution to its K_min-th.
    learners: those whose overlap counts, usually the connected ones.

  Returns:
    Seconds in [0, cap_seconds], and where they come from. If nothing is known
    of these learners' steps, it is the cap.
  """
  known = [
    state.step_seconds[learner]
    for learner in learners
    if learner in state.step_seconds
  ]
  if not known:
    return GraceDecision(options.cap_seconds, 'no estimate yet: the cap')
  overlap_seconds = options.overlap_scans * steps_per_scan * min(known)
  sync = state.sync_seconds
  free = overlap_seconds - quorum_seconds - (sync or 0.0)
  seconds = min(max(options.gamma * free, 0.0), options.cap_seconds)
  sync_text = 'sync unknown' if sync is None else f'sync {sync:.3g} s'
  return GraceDecision(
    seconds,
    f'{options.gamma:g} x (overlap {overlap_seconds:.3g} s - quorum '
    f'{quorum_seconds:.3g} s - {sync_text}), cap {options.cap_seconds:g} s',
  )


def _average(options: GraceOptions, old: float | None, new: float) -> float:
  if old is None:
    return new
  return options.decay * old + (1 - options.decay) * new
