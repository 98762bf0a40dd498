"""The event tape of a machine as a file: write it, read it, follow it.

What the lines are is said in `tape_lines`. The tape of a syncer is the one
stream that everything people see of a run is made from; and fed through
`protocol.machine.replay` it gives the run's decisions again.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from decoupled_diloco.observe.appending import AppendedFile
from decoupled_diloco.observe.tape_lines import (
  BEGIN,
  END,
  LineParser,
  Step,
  group_bytes,
)
from decoupled_diloco.observe.tape_lines import TapeHeader as TapeHeader
from decoupled_diloco.protocol.effects import Effect
from decoupled_diloco.protocol.events import Event


class Segment(NamedTuple):
  """What one process wrote: its header, and each event with its effects."""

  header: TapeHeader
  steps: tuple[Step, ...]


class Tape(NamedTuple):
  """A whole tape.

  Attributes:
    segments: one per process that wrote it, at least one.
    torn: what was left out at the end because it is not whole, as a sentence;
      None if nothing was.
  """

  segments: tuple[Segment, ...]
  torn: str | None

  @property
  def steps(self) -> tuple[Step, ...]:
    """The events of all segments, each with its effects."""
    return tuple(step for segment in self.segments for step in segment.steps)


class TapeWriter:
  """Appends a segment to a tape; every event is in the file at once.

  Attributes:
    cut_bytes: size of the unfinished group that an earlier process left at the
      end of the file, and that was cut off.
  """

  def __init__(self, path: str | os.PathLike[str], header: TapeHeader):
    """Opens or makes the tape and writes the header.

    Raises:
      ValueError: if the file is there and is no tape.
    """
    self._file = AppendedFile(path, begins=BEGIN, ends=END)
    self.cut_bytes = self._file.cut_bytes
    self._file.append(header.to_json().encode() + END)

  def record(self, event: Event, effects: Sequence[Effect]) -> None:
    """Writes one event and its effects.

    Raises:
      OSError: if the disk does not take it; the tape stays whole.
    """
    self._file.append(group_bytes(event, effects))

  def close(self) -> None:
    """Closes the file; a second time does nothing."""
    self._file.close()


class TapeFollower:
  """Reads a tape while it is written.

  Attributes:
    path: of the tape; it need not exist yet.
    segment: number of the segment that was read last, from 0; -1 before any.
    header: the header of that segment; None before any.
    torn: what is there of an event that is not whole (yet), as a sentence;
      None if nothing is.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Begins at the beginning of the tape."""
    self.path = pathlib.Path(path)
    self.segment = -1
    self.header: TapeHeader | None = None
    self.torn: str | None = None
    self._parser = LineParser(str(path))
    self._offset = 0  # End of the last whole group that was parsed.
    self._parsed: list[TapeHeader | Step] = []

  def poll(self, max_bytes: int = 1 << 24) -> list[Step]:
    """The events that have become whole since the last call, with effects.

    They are all of one segment, that of `header` and `segment` after the call;
    what lies beyond the next header comes with the next call. An empty list
    means that the end is reached.

    Args:
      max_bytes: about how much to read at once; more than one event takes.

    Raises:
      ValueError: if the file is damaged or was replaced.
    """
    steps: list[Step] = []
    while not steps:
      if not self._parsed:
        self._parsed = self._parse_more(max_bytes)
      if not self._parsed:
        break
      for count, item in enumerate(self._parsed):
        if not isinstance(item, TapeHeader):
          steps.append(item)
        elif not steps:
          self.header = item
          self.segment += 1
        else:
          self._parsed = self._parsed[count:]
          return steps
      self._parsed = []
    return steps

  def _parse_more(self, max_bytes: int) -> list[TapeHeader | Step]:
    try:
      with self.path.open('rb') as file:
        size = file.seek(0, os.SEEK_END)
        # What is not whole may be cut off by the next writer, the rest never.
        if size < self._offset:
          raise ValueError(
            f'{self.path} has shrunk from {self._offset} to {size} bytes: it '
            'was replaced by another tape; follow that from its beginning.'
          )
        file.seek(self._offset)
        data = file.read(max_bytes)
    except FileNotFoundError:
      return []
    items, whole = self._parser.parse(data)
    self._offset += whole
    self.torn = self._parser.torn(len(data) - whole)
    return items


def follow(path: str | os.PathLike[str]) -> TapeFollower:
  """A reader of a tape that is still being written, or not there yet."""
  return TapeFollower(path)


def read_tape(path: str | os.PathLike[str]) -> Tape:
  """Reads a whole tape. A group that is not whole at its end is left out.

  Raises:
    OSError: if the file cannot be read.
    ValueError: if the file is no tape, or is damaged before its end; with the
      file, the line, what is wrong and what to do.
  """
  parser = LineParser(str(path))
  data = pathlib.Path(path).read_bytes()
  items, whole = parser.parse(data)
  segments: list[tuple[TapeHeader, list[Step]]] = []
  for item in items:
    if isinstance(item, TapeHeader):
      segments.append((item, []))
    else:
      segments[-1][1].append(item)
  if not segments:
    raise ValueError(
      f'{path} holds no whole header; either its writer was stopped before it '
      'began, or it is no tape.'
    )
  return Tape(
    tuple(Segment(header, tuple(steps)) for header, steps in segments),
    parser.torn(len(data) - whole),
  )
