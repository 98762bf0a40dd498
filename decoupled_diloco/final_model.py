"""What a run is for: its global model, as it is at the end."""

from collections.abc import Callable
from typing import Any

from decoupled_diloco.protocol.syncer_state import SyncerState
from decoupled_diloco.run_folder import RunFolder
from decoupled_diloco.storage import snapshots
from decoupled_diloco.training.global_model import GlobalModel


class FinalModel:
  """The global model at the end of a run, saved as soon as it is final.

  Attributes:
    params: its parameters; None before they are final.
    path: of the checkpoint; '' before it is saved.
    tell: is told that it is being saved.
  """

  def __init__(self, folder: RunFolder, model: GlobalModel, like: Any):
    self.params: Any = None
    self.path = ''
    self.tell: Callable[[str], None] = lambda text: None
    self._folder = folder
    self._model = model
    self._like = like

  def save(self, state: SyncerState) -> None:
    """Writes the checkpoint.

    Raises:
      OSError: if it cannot be written.
      ValueError: if something else is in its place.
    """
    self.tell('Saving the checkpoint.')
    self.params = self._model.params(self._like)
    path = str(self._folder.checkpoint)
    snapshots.save(
      path,
      self.params,
      {'versions': list(state.versions), 'reason': state.end_reason},
    )
    self.path = path
