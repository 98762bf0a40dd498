"""What every event of a syncer, and every effect, changes in the status."""

from decoupled_diloco.observe import words
from decoupled_diloco.observe.learner_status import LearnerStatus
from decoupled_diloco.observe.run_status import Fault, ReceiptsDue, RunStatus
from decoupled_diloco.protocol.effects import (
  Accept,
  Broadcast,
  Discard,
  Disconnect,
  Effect,
  Finish,
  GraceBegan,
  Merge,
  Notice,
  Publish,
  Send,
  SendFragments,
)
from decoupled_diloco.protocol.events import (
  Event,
  MergeDone,
  MessageArrived,
  Restarted,
)
from decoupled_diloco.protocol.messages import (
  Contribution,
  DrainStarted,
  Farewell,
  Heartbeat,
  Hello,
  Lacking,
  Message,
  Ready,
  Receipt,
  Refusal,
  Rejection,
  RoundOpened,
  Welcome,
)


def hear(status: RunStatus, event: MessageArrived) -> None:
  """A learner says something."""
  message = event.message
  if not isinstance(
    message, Contribution | Heartbeat | Ready | Receipt | Lacking | Farewell
  ):
    return
  learner = status.learners.get(message.learner)
  if event.payload:
    status.bytes_up += event.payload.num_bytes
    if learner:
      learner.bytes_up += event.payload.num_bytes
  if (
    learner is None
    or not learner.is_connected
    or learner.incarnation != message.incarnation
  ):
    return
  learner.last_seen = status.now
  match message:
    case Ready() if learner.state != words.DONE:
      learner.state = words.WAITING
    case Farewell():
      if learner.state != words.DONE and status.phase not in (
        words.DRAINING,
        words.FINISHED,
      ):
        status.tell(
          'left', f'Learner {learner.learner} leaves: {message.reason}'
        )
      learner.state = words.DONE
      learner.lost_because = message.reason
    case Heartbeat():
      learner.report(message.total_steps, message.total_tokens)
      if learner.state != words.DONE:
        learner.state = message.activity
      if message.loss is not None:
        learner.loss = message.loss
      learner.tokens_per_second = message.tokens_per_second
      if message.tokens_per_second > 0:
        learner.rates.add(message.tokens_per_second)
    case Contribution():
      learner.report(message.total_steps, message.total_tokens)
    case Receipt():
      _receive(status, learner.learner, message.round)


def lose(status: RunStatus, number: int, incarnation: int, reason: str) -> None:
  """A learner's connection is gone."""
  learner = status.learners.get(number)
  if (
    learner is None
    or not learner.is_connected
    or learner.incarnation != incarnation
  ):
    return
  if learner.state != words.DONE and status.phase != words.FINISHED:
    status.tell('lost', f'Learner {number} is lost: {reason}')
    learner.lose(reason)
  else:
    learner.lose(learner.lost_because or reason)
  _receive(status, number, None)


def _receive(status: RunStatus, learner: int, round_: int | None) -> None:
  """A learner has received a round; None: it will receive nothing more."""
  for fragment, due in list(status.receipts_due.items()):
    if round_ not in (None, due.round):
      continue
    left = due.learners - {learner}
    if left:
      status.receipts_due[fragment] = due._replace(learners=left)
    else:
      del status.receipts_due[fragment]


def take_effect(status: RunStatus, event: Event, effect: Effect) -> None:
  """The syncer does something about the event."""
  match effect:
    case Send(message=message):
      _sent(status, event, message)
    case Broadcast(message=RoundOpened(round=round_)):
      _open(status, round_)
    case Broadcast(message=DrainStarted()):
      status.phase = words.DRAINING
      if status.drain_at is None:
        status.drain_at = status.now
    case SendFragments(learner=learner, fragments=fragments):
      sizes = status.fragment_value_bytes
      num_bytes = sum(sizes[p] for p in fragments if 0 <= p < len(sizes))
      _count_down(status, learner, num_bytes, 'values')
    case GraceBegan():
      status.quorum_seconds.add(effect.quorum_seconds)
      status.grace_seconds.add(effect.grace_seconds)
    case Accept():
      _accept(status, event)
    case Discard(learner=learner, round=round_):
      status.accepted.pop((round_, learner), None)
    case Merge():
      status.merging[effect.round] = effect
    case Publish():
      assert isinstance(event, MergeDone)
      _merged(status, event, effect)
    case Disconnect():
      lose(status, effect.learner, effect.incarnation, effect.reason)
    case Notice(text=text):
      status.tell('notice', text)
    case Finish(reason=reason, is_failure=is_failure):
      status.phase = words.FINISHED
      status.ended_at = status.now
      status.end_reason, status.is_failure = reason, is_failure
      status.receipts_due.clear()
      for learner in status.learners.values():
        if learner.is_connected:
          learner.state = words.DONE
      status.tell('finished', f'Finished: {reason}')


def _sent(status: RunStatus, event: Event, message: Message) -> None:
  match message:
    case Welcome():
      _admit(status, event, message)
    case Rejection(reason=reason):
      status.rejections += 1
      status.tell('rejected', f'Not admitted: {reason}')
    case Refusal(learner=number, reason=reason):
      status.refusals[reason.value] += 1
      learner = status.learners.get(number)
      if learner:
        learner.refusals[reason.value] += 1
        _count_up(learner, event, 'refused')


def _admit(status: RunStatus, event: Event, welcome: Welcome) -> None:
  number = welcome.learner
  learner = status.learners[number]
  hello = event.message if isinstance(event, MessageArrived) else None
  is_new = not isinstance(hello, Hello) or hello.incarnation == 0
  is_first = learner.incarnation == 0
  away = status.now - (learner.last_seen or 0.0)
  is_survived = learner.admit(
    status.now, welcome.incarnation, welcome.total_tokens
  )
  if is_first:
    status.tell('joined', f'Learner {number} has joined.')
    return
  if is_survived:
    fault = Fault(status.now, number, away, learner.lost_because, is_new)
    status.faults.append(fault)
  how = 'as a new process' if is_new else 'by a new connection'
  status.tell('back', f'Learner {number} is back after {away:.1f} s, {how}.')


def _open(status: RunStatus, round_: int) -> None:
  if status.opened_at is None:
    status.opened_at = status.now
    count = sum(
      learner.is_connected and learner.state != words.JOINING
      for learner in status.learners.values()
    )
    status.tell(
      'started',
      f'Round {round_} is open: training begins with {count} of '
      f'{len(status.learners)} learners.',
    )
  status.phase = words.RUNNING
  status.drain_at = status.ended_at = None
  status.current_round = max(status.current_round, round_)


def _accept(status: RunStatus, event: Event) -> None:
  assert isinstance(event, MessageArrived)
  entry = event.message
  assert isinstance(entry, Contribution)
  status.accepted[entry.round, entry.learner] = entry
  learner = status.learners.get(entry.learner)
  if learner:
    _count_up(learner, event, 'accepted')
  if event.payload:
    status.accepted_bits += 8 * event.payload.num_bytes
    status.accepted_elements += status.fragment_sizes[entry.fragment]


def go_on(status: RunStatus, event: Restarted) -> None:
  """The syncer was started again, and goes on with the run."""
  for round_ in event.merged:
    if round_ in status.merging:
      _credit(status, round_)
  status.merging.clear()
  status.accepted.clear()
  if event.state is not None:
    # Of what happened just before, the tape may have missed something.
    merged = event.state.rounds_merged + len(event.merged)
    status.rounds_merged = max(status.rounds_merged, merged)
  if status.opened_at is not None:
    status.phase = words.RUNNING


def _merged(status: RunStatus, event: MergeDone, publish: Publish) -> None:
  """A round is merged and durable."""
  status.contributors = publish.contributors
  status.published_bits += 8 * event.num_bytes
  status.published_elements += status.fragment_sizes[publish.fragment]
  for number in publish.learners:
    _count_down(status, number, event.num_bytes, 'publications')
  status.receipts_due.pop(publish.fragment, None)
  if publish.learners:
    status.receipts_due[publish.fragment] = ReceiptsDue(
      publish.round, frozenset(publish.learners)
    )
  _credit(status, publish.round)
  status.merged_tokens = max(status.merged_tokens, publish.merged_tokens)


def _credit(status: RunStatus, round_: int) -> None:
  """Everything in a round is credited, now that it is merged."""
  status.rounds_merged += 1
  merge = status.merging.pop(round_, None)
  weights = (
    {share.learner: share.weight for share in merge.shares} if merge else {}
  )
  total_weight = sum(weights.values())
  for number, learner in status.learners.items():
    entry = status.accepted.pop((round_, number), None)
    if number not in weights or entry is None:
      learner.count_round(None, 0, 0.0)
      continue
    tokens = entry.tokens / status.num_fragments
    status.merged_tokens += tokens
    learner.covered.add(
      max(entry.total_tokens - entry.tokens, 0), entry.total_tokens
    )
    learner.count_round(
      weights[number] / total_weight,
      merge.version - 1 - entry.base_version if merge else 0,
      tokens,
    )


def _count_up(learner: LearnerStatus, event: Event, outcome: str) -> None:
  """What became of a contribution that has just come."""
  if isinstance(event, MessageArrived) and event.payload:
    learner.traffic[f'up {outcome}'] += event.payload.num_bytes


def _count_down(
  status: RunStatus, number: int, num_bytes: int, purpose: str
) -> None:
  status.bytes_down += num_bytes
  learner = status.learners.get(number)
  if learner:
    learner.bytes_down += num_bytes
    learner.traffic[f'down {purpose}'] += num_bytes
