"""How a process answers Ctrl-C and SIGTERM, from its first moment on.

Nothing but the standard library is imported here: `at_once` has to be called
before the imports that take seconds, in which a signal may come as well.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_code(number: int) -> int:
  """The exit code of a process that a signal has ended, as shells have it."""
  return 128 + number


def reason(number: int) -> str:
  """Why something ended, as half a sentence."""
  return f'stopped by {signal.Signals(number).name}'


def at_once() -> None:
  """From now on a signal ends the process, with one line and its exit code.

  For a process that has begun nothing yet. It does not raise
  `KeyboardInterrupt`, which would end in a traceback, or be swallowed by
  whatever is being imported.
  """

  def handle(number: int) -> None:
    end(number, f'error: {reason(number)} before the run began.')

  _on_signals(handle)


def in_order(
  request_stop: Callable[[int], None],
  end_at_once: Callable[[int], None] | None = None,
) -> None:
  """From now on the first signal asks for an end in order.

  Args:
    request_stop: is given its number, wherever the main thread is: it must
      neither wait nor take a lock.
    end_at_once: is given the number of a second one; by default, the process
      ends without any cleaning up.
  """
  seen: list[int] = []

  def handle(number: int) -> None:
    if not seen:
      seen.append(number)
      _write('\nStopping in order; once more to stop at once.')
      request_stop(number)
    elif end_at_once is not None:
      end_at_once(number)
    else:
      end(number, f'error: {reason(number)}, at once.')

  _on_signals(handle)


def end(number: int, line: str) -> NoReturn:
  """Ends the process here and now, with a line on standard error."""
  _write(line)
  os._exit(exit_code(number))


def _on_signals(handle: Callable[[int], None]) -> None:
  def handler(number: int, frame: FrameType | None) -> None:
    del frame
    handle(number)

  for number in SIGNALS:
    signal.signal(number, handler)


def _write(line: str) -> None:
  # Not print, whose lock the interrupted code may hold.
  os.write(2, f'{line}\n'.encode())
