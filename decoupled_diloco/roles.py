"""The roles of a run, put together from its options: syncer and learner."""

from decoupled_diloco.building import build_plan as build_plan
from decoupled_diloco.building import build_task as build_task
from decoupled_diloco.building import check as check
from decoupled_diloco.building import fitted_to_data as fitted_to_data
from decoupled_diloco.learner_role import LearnerSetup as LearnerSetup
from decoupled_diloco.learner_role import run_learner as run_learner
from decoupled_diloco.learner_role import set_up_learner as set_up_learner
from decoupled_diloco.run_result import Result as Result
from decoupled_diloco.syncer_role import run_syncer as run_syncer
from decoupled_diloco.syncer_role import set_up_syncer as set_up_syncer
