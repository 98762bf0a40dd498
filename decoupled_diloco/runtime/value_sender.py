"""Sends fragments themselves to learners that lack them.

To encode a large fragment takes long, and the thread that decides must not wait
for it: the encoding runs on the executor of the merges. One fragment is encoded
at a time, for all learners that lack it, so that no more than one lies in
memory beside what the transport has queued.

A value is the version that its message names. It is asked for while no merge of
its fragment is under way, a merge that comes afterwards waits for it, and if
that merge has been published by the time the value is there, it is encoded
again.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import NamedTuple, Protocol

from decoupled_diloco.transport.base import Payload


class Encoded(NamedTuple):
  """A fragment's value, as it was at a version."""

  fragment: int
  version: int
  payload: Payload


class Desk(Protocol):
  """What the sender needs of its server, on the thread that decides."""

  def version_of(self, fragment: int) -> int:
    """The fragment's newest published version."""
    ...

  def is_merging(self, fragment: int) -> bool:
    """Whether a merge is making the next one."""
    ...

  def send_value(self, learner: int, fragment: int, payload: Payload) -> bool:
    """Sends the value of the current version; False if there is no room."""
    ...


class ValueSender:
  """Who lacks what; encodes it and sends it.

  Everything but the encoding happens on the thread that decides.

  Args:
    desk: of the server.
    encode: gives the payload of a fragment's value.
    executor: where that runs.
    post: is given what was encoded, or the error, on that thread; has to bring
      the former to `take`.
  """

  def __init__(
    self,
    desk: Desk,
    encode: Callable[[int], Payload],
    executor: Executor,
    post: Callable[[Encoded | BaseException], None],
  ):
    self._desk = desk
    self._encode = encode
    self._executor = executor
    self._post = post
    self._lacking: dict[int, set[int]] = {}  # By learner.
    self._full: set[int] = set()  # Learners without room in their queues.
    self._current: tuple[int, Future[Encoded]] | None = None

  def welcome(self, learner: int) -> None:
    """A learner is new on its connection, and lacks nothing yet."""
    self._lacking[learner] = set()
    self._full.discard(learner)

  def forget(self, learner: int) -> None:
    """A learner's connection is gone."""
    self._lacking.pop(learner, None)
    self._full.discard(learner)

  def is_lacking(self, learner: int, fragment: int) -> bool:
    """Whether a learner is going to be sent a fragment's value."""
    return fragment in self._lacking.get(learner, ())

  def add(
    self, learner: int, fragments: Iterable[int], *, has_room: bool = True
  ) -> None:
    """A learner lacks these fragments.

    Args:
      learner: which learner.
      fragments: in addition to what it lacks already.
      has_room: whether it can be sent anything now.
    """
    self._lacking.setdefault(learner, set()).update(fragments)
    if not has_room:
      self._full.add(learner)
    self.go_on()

  def retry(self, learner: int) -> None:
    """A learner gives a sign of life: there may be room again."""
    if learner in self._full:
      self._full.discard(learner)
      self.go_on()

  def take(self, encoded: Encoded) -> None:
    """Sends what was encoded, if it is still the newest."""
    self._current = None
    fragment = encoded.fragment
    # If a merge of it is under way, the publication follows this value.
    if self._desk.version_of(fragment) == encoded.version:
      for learner, lacking in self._lacking.items():
        if fragment not in lacking or learner in self._full:
          continue
        if self._desk.send_value(learner, fragment, encoded.payload):
          lacking.discard(fragment)
        else:
          self._full.add(learner)
    self.go_on()

  def go_on(self) -> None:
    """Has the next fragment encoded that somebody lacks and has room for."""
    if self._current is not None:
      return
    wanted = set[int]().union(
      *(
        fragments
        for learner, fragments in self._lacking.items()
        if learner not in self._full
      )
    )
    for fragment in sorted(wanted):
      # While it is being merged its publication is near: it is the next version
      # that the learner is sent then.
      if not self._desk.is_merging(fragment):
        self._start(fragment)
        return

  def pending(self, fragment: int) -> Future[Encoded] | None:
    """What a merge of this fragment has to wait for, where it runs.

    None if there is nothing. It was submitted before that merge, so it runs
    already or has run.
    """
    if self._current is None or self._current[0] != fragment:
      return None
    return self._current[1]

  def _start(self, fragment: int) -> None:
    version = self._desk.version_of(fragment)

    def work() -> Encoded:
      return Encoded(fragment, version, self._encode(fragment))

    def done(future: Future[Encoded]) -> None:
      error = future.exception()
      self._post(future.result() if error is None else error)

    future = self._executor.submit(work)
    self._current = (fragment, future)
    future.add_done_callback(done)
