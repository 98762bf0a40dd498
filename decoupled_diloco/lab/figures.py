"""What is kept of a run in a study."""

from collections.abc import Mapping
from typing import Any

from decoupled_diloco.lab.cluster import VirtualCluster
from decoupled_diloco.ops import payloads
from decoupled_diloco.ops.codecs import Codec
from decoupled_diloco.training.wire_format import wire_format
from decoupled_diloco.virtual.setup import VirtualSetup


def figures_of(config: Mapping[str, Any]) -> dict[str, Any]:
  """Runs a cluster; its figures as plain values, as a study keeps them."""
  cluster = VirtualCluster(config)
  result = cluster.run()
  shares = [value for value in result.participation.values() if value]
  figures = {
    'loss': result.loss,
    'curve': [[point.merged_tokens, point.loss] for point in result.points],
    'timeline': [[point.seconds, point.loss] for point in result.points],
    'goodput': result.goodput,
    'yield': result.yield_,
    'participation': min(shares) if shares else None,
    'participations': list(result.participation.values()),
    'staleness': result.mean_staleness,
    'overlap_steps': result.overlap_steps,
    'virtual_seconds': result.seconds,
    'rounds': result.rounds,
    'processed_tokens': result.processed_tokens,
    'merged_tokens': result.merged_tokens,
    'parameters': cluster.setup.plan.num_elements,
  }
  if cluster.options.cluster.mode != 'data_parallel':
    figures |= _bits(cluster.setup)
  return figures


def _bits(setup: VirtualSetup) -> dict[str, float]:
  """Bits per parameter and synchronisation, without framing."""
  wire = wire_format(setup.wire)
  down = wire.value if wire.form == 'value' else wire.down

  def nbytes(codec: Codec) -> int:
    return sum(
      payloads.encoded_nbytes(codec, setup.plan.shapes(p))
      for p in range(setup.plan.num_fragments)
    )

  return {
    name: 8 * nbytes(codec) / setup.plan.num_elements
    for name, codec in (('bits_up', wire.up), ('bits_down', down))
  }
