"""Decoupled DiLoCo: resilient distributed pre-training in JAX.

  import decoupled_diloco as ddl

  plan = ddl.fragment(params, num_fragments=24)
  tx = ddl.outer_optimizer(learning_rate=0.3, momentum=0.9)
  outer = ddl.outer_transform(tx, merge='rda', plan=plan)

The names below are loaded when they are first used, so that the parts that need
no JAX (`protocol`, `transport`) do not load it.

Reference: Decoupled DiLoCo for Resilient Distributed Pre-training (Douillard et
al., arXiv 2604.21428).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from decoupled_diloco.lab.cluster import VirtualCluster as VirtualCluster
  from decoupled_diloco.ops.adopt import adopt as adopt
  from decoupled_diloco.ops.codecs import codec as codec
  from decoupled_diloco.ops.fragments import FragmentPlan as FragmentPlan
  from decoupled_diloco.ops.fragments import fragment as fragment
  from decoupled_diloco.ops.merge import pseudo_gradient as pseudo_gradient
  from decoupled_diloco.ops.merge import (
    radial_directional as radial_directional,
  )
  from decoupled_diloco.ops.merge import weighted_mean as weighted_mean
  from decoupled_diloco.ops.outer import outer_optimizer as outer_optimizer
  from decoupled_diloco.ops.outer import outer_transform as outer_transform
  from decoupled_diloco.protocol.weights import (
    contribution_weight as contribution_weight,
  )

_HOMES = {
  'adopt': 'ops.adopt',
  'codec': 'ops.codecs',
  'contribution_weight': 'protocol.weights',
  'fragment': 'ops.fragments',
  'FragmentPlan': 'ops.fragments',
  'outer_optimizer': 'ops.outer',
  'outer_transform': 'ops.outer',
  'pseudo_gradient': 'ops.merge',
  'radial_directional': 'ops.merge',
  'VirtualCluster': 'lab.cluster',
  'weighted_mean': 'ops.merge',
}


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_HOMES[name]}')
  return getattr(module, name)


def __dir__() -> list[str]:
  return sorted({*globals(), *_HOMES})
