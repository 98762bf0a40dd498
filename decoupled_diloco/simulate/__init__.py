"""Discrete-event simulation of a cluster: the protocol without any arrays."""

from decoupled_diloco.simulate.engine import Engine as Engine
from decoupled_diloco.simulate.options import EngineOptions as EngineOptions
from decoupled_diloco.simulate.options import FailureOptions as FailureOptions
from decoupled_diloco.simulate.options import Fault as Fault
from decoupled_diloco.simulate.options import LinkOptions as LinkOptions
from decoupled_diloco.simulate.options import SpeedOptions as SpeedOptions
from decoupled_diloco.simulate.work import NoWork as NoWork
from decoupled_diloco.simulate.work import Payload as Payload
from decoupled_diloco.simulate.work import Work as Work
