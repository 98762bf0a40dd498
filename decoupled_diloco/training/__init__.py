"""One learner's computation: mesh, inner optimizer, jitted scan, evaluation.

The function `learning_rate` is left in `training.inner`.
"""

from decoupled_diloco.training.evaluation import held_out_loss as held_out_loss
from decoupled_diloco.training.inner import InnerOptions as InnerOptions
from decoupled_diloco.training.inner import inner_optimizer as inner_optimizer
from decoupled_diloco.training.mesh import MeshOptions as MeshOptions
from decoupled_diloco.training.mesh import make_mesh as make_mesh
from decoupled_diloco.training.step import TrainScan as TrainScan
from decoupled_diloco.training.step import TrainState as TrainState
from decoupled_diloco.training.step import make_train_scan as make_train_scan
