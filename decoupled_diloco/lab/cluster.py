"""The whole system in one process, from a config."""

from collections.abc import Callable
from typing import Any

from decoupled_diloco.lab import run_config
from decoupled_diloco.virtual import data_parallel
from decoupled_diloco.virtual.cluster import VirtualCluster as _Cluster
from decoupled_diloco.virtual.result import Point, Result


class VirtualCluster:
  """M learners, a syncer and a network, with real gradients in virtual time.

  The same config gives the same tape and the same parameters, bit for bit.

    from decoupled_diloco.lab import runs
    import decoupled_diloco as ddl

    config = runs.small_run()
    config.membership.num_learners = 4
    config.budget.rounds = 100
    config.failures.schedule = ((60.0, 2, 'kill', 30.0),)
    result = ddl.VirtualCluster(config).run()
    result.loss, result.goodput, result.yield_, result.participation

  Args:
    config: from `lab.run_config.default_run` or `lab.runs`, a ConfigDict or
      plain values. `config.cluster.mode` chooses the method: 'decoupled',
      'streaming', 'diloco' or 'data_parallel'.
    on_point: told of every evaluation, as it is made.

  Raises:
    ValueError: with the field, the rule, the value and what to do.
  """

  def __init__(
    self,
    config: Any,
    on_point: Callable[[Point], object] = lambda point: None,
  ):
    raw = config.to_dict() if hasattr(config, 'to_dict') else config
    self.options = run_config.options_of(raw)
    self.setup = run_config.setup_of(self.options)
    self._on_point = on_point

  def run(self) -> Result:
    """Runs until the budget is met and everything is merged.

    Raises:
      FloatingPointError: if a loss or a merge is not finite.
    """
    if self.options.cluster.mode == 'data_parallel':
      return data_parallel.run(self.setup, self._on_point)
    return _Cluster(self.setup, self._on_point).run()
