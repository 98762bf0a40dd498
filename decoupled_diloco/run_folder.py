"""The folder of a run: what lies where, and who may write there."""

import os
import pathlib

# The file that says whose folder it is, from the first moment on.
_CLAIM = 'claimed'


class RunFolder:
  """Paths in the folder that `config.workdir` names.

  Attributes:
    root: the folder itself, absolute.
    address: where the syncer listens, once it does.
    tape: the syncer's events; there from the beginning of the run on.
    metrics: figures of the run over time.
    result: how the run ended.
    summary: all figures of the run at its end.
    checkpoint: the final global model.
    syncer: what the syncer must not lose.
    logs: what processes print.
  """

  def __init__(self, workdir: str):
    self.root = pathlib.Path(workdir).resolve()
    self.address = self.root / 'address'
    self.tape = self.root / 'events.jsonl'
    self.metrics = self.root / 'metrics.jsonl'
    self.result = self.root / 'result.json'
    self.summary = self.root / 'summary.json'
    self.checkpoint = self.root / 'checkpoint'
    self.syncer = self.root / 'syncer'
    self.logs = self.root / 'logs'

  def learner_tape(self, learner: int) -> pathlib.Path:
    """The events of a learner."""
    return self.root / 'learners' / str(learner) / 'events.jsonl'

  def learner_snapshots(self, learner: int) -> pathlib.Path:
    """The snapshots of a learner."""
    return self.root / 'learners' / str(learner) / 'snapshots'

  def claim(self, *, resume: bool = False) -> None:
    """Makes the folder, for one run.

    Args:
      resume: whether a run that is there is the one. That no other process
        continues it as well, the syncer's own lock ensures.

    Raises:
      ValueError: if it holds another run, or cannot be made or written.
    """
    if resume and self.syncer.exists():
      return
    for path, what in ((self.tape, 'run'), (self.checkpoint, 'checkpoint')):
      if path.exists():
        raise ValueError(
          f'config.workdir={self.root} must be a folder for this run alone, '
          f'and holds a {what} already ({path.name}); choose another folder, '
          'remove that one, or continue it with --config.resume=True.'
        )
    self.make(self.root)
    try:
      (self.root / _CLAIM).touch(exist_ok=False)
    except FileExistsError:
      raise ValueError(
        f'config.workdir={self.root} belongs to a run that is starting (or was '
        f'killed while it did: then remove {self.root / _CLAIM}); choose '
        'another folder.'
      ) from None
    except OSError as error:
      raise self._unusable(error) from error

  def make(self, folder: pathlib.Path) -> None:
    """Makes a folder, this one or one in it.

    Raises:
      ValueError: if that cannot be.
    """
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise self._unusable(error) from error

  def unclaim(self) -> None:
    """Makes the folder fit for another attempt, if no run has begun in it."""
    if self.tape.exists():
      with self.tape.open('rb') as tape:
        next(tape, None)  # The header, which is there before any event.
        if next(tape, None) is not None:
          return
      self.tape.unlink()
    (self.root / _CLAIM).unlink(missing_ok=True)

  def _unusable(self, error: OSError) -> ValueError:
    existing = self.root
    while not existing.exists():
      existing = existing.parent
    if not existing.is_dir():
      why = f'{existing} is a file'
    else:
      why = f'{error.strerror}: {error.filename}'
    return ValueError(
      f'config.workdir={self.root} must be a folder that can be written '
      f'({why}); choose another one.'
    )


def write_whole(path: pathlib.Path, text: str) -> None:
  """Writes a file so that whoever sees it sees all of it.

  Raises:
    OSError: if it cannot be written.
  """
  temporary = path.with_name(f'{path.name}.{os.getpid()}.unfinished')
  try:
    temporary.write_text(text)
    temporary.replace(path)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    raise OSError(
      f'{path} cannot be written ({error.strerror}); free some space, or '
      'choose another config.workdir.'
    ) from error
