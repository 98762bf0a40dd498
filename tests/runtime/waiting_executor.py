"""An executor that runs what was submitted when the test says so."""

from concurrent.futures import Executor, Future


class WaitingExecutor(Executor):
  """Runs on the thread that says so; `waiting` is what has not run yet."""

  def __init__(self):
    self.waiting = []

  def submit(self, fn, /, *args, **kwargs):
    future = Future()
    self.waiting.append((future, lambda: fn(*args, **kwargs)))
    return future

  def run_next(self):
    """Runs what was submitted first; returns what it has made, if anything."""
    future, work = self.waiting.pop(0)
    try:
      made = work()
    except Exception as error:
      future.set_exception(error)
      return None
    future.set_result(made)
    return made

  def run_all(self):
    """Runs what was submitted, in order."""
    while self.waiting:
      self.run_next()
