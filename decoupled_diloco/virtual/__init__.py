"""A cluster in one process on a virtual clock, with real mathematics."""

from decoupled_diloco.virtual.cluster import VirtualCluster as VirtualCluster
from decoupled_diloco.virtual.result import Point as Point
from decoupled_diloco.virtual.result import Result as Result
from decoupled_diloco.virtual.setup import LearnerSetup as LearnerSetup
from decoupled_diloco.virtual.setup import VirtualSetup as VirtualSetup
from decoupled_diloco.virtual.setup import held_out as held_out
