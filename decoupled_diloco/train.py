"""Trains a model with Decoupled DiLoCo.

  python -m decoupled_diloco.train --config=configs/quickstart.py

runs a syncer and all learners as processes of this machine. On several
machines, one process each:

  python -m decoupled_diloco.train --config=CONFIG --config.role=syncer \
      --config.syncer.address=HOST:PORT
  python -m decoupled_diloco.train --config=CONFIG --config.role=learner \
      --config.learner=0 --config.syncer.address=HOST:PORT

Any field of the config can be set with --config.SECTION.FIELD=VALUE. The exit
code is 0 only if the run met its budget and its parameters are finite.
"""

import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from decoupled_diloco import configuring
