"""The final model is there, and saved, once it is final."""

import numpy as np
import pytest

from decoupled_diloco.final_model import FinalModel
from decoupled_diloco.run_folder import RunFolder
from decoupled_diloco.storage import snapshots
from tests.protocol.scripts import SyncerScript
from tests.training.global_models import (
  assert_same_bits,
  make_model,
  make_params,
)


def test_it_is_saved_and_kept(tmp_path):
  folder, model = RunFolder(str(tmp_path)), make_model()
  final, told = FinalModel(folder, model, make_params()), []
  final.tell = told.append
  assert final.params is None and final.path == ''
  state = SyncerScript(M=2, P=2, H=2).state
  final.save(state)
  assert told == ['Saving the checkpoint.']
  assert final.path == str(folder.checkpoint)
  assert_same_bits(final.params, model.params(make_params()))
  saved, description = snapshots.restore(final.path, final.params)
  assert_same_bits(*(_on_host(params) for params in (saved, final.params)))
  assert description == {
    'versions': list(state.versions),
    'reason': state.end_reason,
  }


def test_it_is_kept_if_it_cannot_be_saved(tmp_path):
  folder = RunFolder(str(tmp_path))
  folder.checkpoint.write_text('in the way')
  final = FinalModel(folder, make_model(), make_params())
  with pytest.raises(ValueError, match='is there already'):
    final.save(SyncerScript(M=2, P=2, H=2).state)
  assert final.path == '' and final.params is not None


def _on_host(params):
  return {name: np.asarray(params[name]) for name in ('embed', 'scale')}
