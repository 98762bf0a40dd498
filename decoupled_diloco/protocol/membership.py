"""Who takes part, in which life, and since when nothing was heard of them.

The timeouts, in the order in which they must grow:

  heartbeat_seconds < liveness_timeout_seconds / 3

so that one or two lost heartbeats never cost a healthy learner its place. The
transport's keep-alive only speeds up the discovery of broken connections; this
timeout is what decides.
"""

import dataclasses
import operator
from collections.abc import Mapping
from typing import NamedTuple

from decoupled_diloco.protocol.messages import PROTOCOL_VERSION, Hello


@dataclasses.dataclass(frozen=True, slots=True)
class MembershipOptions:
  """Who may take part, and how silence is judged.

  Attributes:
    num_learners: M; learners are numbered from 0 and may join at any time.
    heartbeat_seconds: how often a learner says that it is alive.
    liveness_timeout_seconds: after so much silence a learner counts as absent.
    start_timeout_seconds: the run starts when all M learners are ready, or
      after this time with K_min of them.
  """

  num_learners: int = 2
  heartbeat_seconds: float = 1.0
  liveness_timeout_seconds: float = 10.0
  start_timeout_seconds: float = 120.0

  def __post_init__(self):
    if self.num_learners < 1:
      raise ValueError(f'num_learners={self.num_learners} must be at least 1.')
    if self.heartbeat_seconds <= 0:
      raise ValueError(
        f'heartbeat_seconds={self.heartbeat_seconds} must be positive.'
      )
    if self.liveness_timeout_seconds < 3 * self.heartbeat_seconds:
      raise ValueError(
        f'liveness_timeout_seconds={self.liveness_timeout_seconds} must be at '
        f'least 3 x heartbeat_seconds={self.heartbeat_seconds}, so that a lost '
        f'heartbeat evicts nobody; set it to {3 * self.heartbeat_seconds} or '
        'more.'
      )
    if self.start_timeout_seconds < 0:
      raise ValueError(
        f'start_timeout_seconds={self.start_timeout_seconds} must not be '
        'negative.'
      )


class Member(NamedTuple):
  """What the syncer knows of a learner.

  Attributes:
    incarnation: number of its present or last life.
    is_connected: whether that life is reachable.
    is_ready: it has compiled and trains, or could.
    farewell: the rounds that may still come from it, once it has said that it
      hands nothing over any more; None before.
    admitted_at: when its present or last life began, in seconds.
    last_seen: when it was last heard of, in seconds.
    heard_incarnation: its newest life that has answered its welcome.
    last_round: the newest round that holds a contribution of it; -1 if none.
    merged_rounds: per fragment, the last round in which it was merged; or -1.
    total_steps, total_tokens: how far it has come, over all its lives.
    merged_steps, merged_tokens: how far its merged contributions reach, in
      steps and tokens since the run began.
    unsound: how many contributions in a row were refused because its
      arithmetic is wrong.
    unsound_steps: its total steps at the last of them; -1 before the first.
    quarantine: why it is kept out until another process takes its number; ''
      if it is not.
  """

  incarnation: int
  is_connected: bool
  is_ready: bool
  farewell: tuple[int, ...] | None
  admitted_at: float
  last_seen: float
  last_round: int
  merged_rounds: tuple[int, ...]
  total_steps: int = 0
  total_tokens: int = 0
  merged_steps: int = 0
  merged_tokens: int = 0
  heard_incarnation: int = 0
  unsound: int = 0
  unsound_steps: int = -1
  quarantine: str = ''

  @property
  def is_expected(self) -> bool:
    """Whether a round that includes everybody must include this learner."""
    return self.is_connected and self.is_ready and self.farewell is None

  def may_join(self, number: int) -> bool:
    """Whether a contribution of it to this round may come or have come."""
    if self.farewell is not None and number not in self.farewell:
      return False
    return self.is_connected and self.is_ready


def objection(
  options: MembershipOptions,
  members: Mapping[int, Member],
  hello: Hello,
  *,
  run_id: str,
  layout: str,
  versions: tuple[int, ...],
) -> str | None:
  """Why a learner may not take part; None if it may."""
  if hello.protocol != PROTOCOL_VERSION:
    return (
      f'the learner speaks protocol {hello.protocol}, the syncer '
      f'{PROTOCOL_VERSION}; install the same version of decoupled_diloco.'
    )
  if not 0 <= hello.learner < options.num_learners:
    return (
      f'learner {hello.learner} is not one of the num_learners='
      f'{options.num_learners} learners 0 to {options.num_learners - 1}; '
      'choose a free number or raise num_learners.'
    )
  if hello.layout != layout:
    return (
      f"learner {hello.learner}'s layout {hello.layout[:12]} differs from the "
      f"syncer's {layout[:12]}: model, fragments and codecs must be the same; "
      'start both with the same config.'
    )
  if hello.run_id not in ('', run_id):
    return (
      f'learner {hello.learner} belongs to run {hello.run_id}, this syncer '
      f'serves run {run_id}; correct the address, or start the learner without '
      'the snapshots of the other run (resume=False).'
    )
  if hello.versions and (
    len(hello.versions) != len(versions)
    or any(map(operator.gt, hello.versions, versions))
  ):
    return (
      f'learner {hello.learner} holds the versions {hello.versions} of the '
      f'fragments, the syncer only {versions}: it has lost progress; restore '
      'its journal, or start a new run.'
    )
  member = members.get(hello.learner)
  # A welcome can be lost with its connection: only a life that has answered it
  # supersedes the one before.
  if member is not None and 0 < hello.incarnation < member.heard_incarnation:
    return (
      f'learner {hello.learner} was started again elsewhere (incarnation '
      f'{member.heard_incarnation}); this process (incarnation '
      f'{hello.incarnation}) is superseded.'
    )
  # Another process may run on sound hardware; this one is what it was.
  if member is not None and hello.incarnation > 0 and member.quarantine:
    return member.quarantine
  return None


def admit(
  member: Member | None,
  *,
  now: float,
  incarnation: int,
  num_fragments: int,
  is_new_process: bool = True,
) -> Member:
  """The member after its admission, with what is remembered of former lives."""
  if member is None:
    member = Member(
      incarnation=incarnation,
      is_connected=True,
      is_ready=False,
      farewell=None,
      admitted_at=now,
      last_seen=now,
      last_round=-1,
      merged_rounds=(-1,) * num_fragments,
    )
  if is_new_process:
    member = member._replace(unsound=0, unsound_steps=-1, quarantine='')
  return member._replace(
    incarnation=incarnation,
    is_connected=True,
    is_ready=False,
    farewell=None,
    admitted_at=now,
    last_seen=now,
  )
