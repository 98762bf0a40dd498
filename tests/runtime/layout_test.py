"""What both ends of a run must agree on."""

import dataclasses

import jax
import jax.numpy as jnp

from decoupled_diloco.ops.fragments import fragment
from decoupled_diloco.protocol.schedule import ScheduleOptions
from decoupled_diloco.runtime.layout import layout_digest
from decoupled_diloco.training.wire_format import WireOptions

SHAPES = {
  'a': jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
  'b': jax.ShapeDtypeStruct((4,), jnp.float32),
}
SCHEDULE = ScheduleOptions(sync_every=4, num_fragments=2)


def test_the_digest_tells_what_differs():
  plan = fragment(SHAPES, num_fragments=2)
  base = WireOptions(down='bf16', down_error_feedback=False)
  changes = [
    {'up': 'int8'},
    {'up_error_feedback': True},
    {'down': 'f32'},
    {'down_form': 'value'},
    {'down_error_feedback': True},
    {'block_size': 128},
  ]
  digests = [layout_digest(plan, SCHEDULE, base)]
  for change in changes:
    digests.append(
      layout_digest(plan, SCHEDULE, dataclasses.replace(base, **change))
    )
  digests.append(
    layout_digest(fragment(SHAPES, num_fragments=1), SCHEDULE, base)
  )
  assert len(set(digests)) == len(changes) + 2
  # Another process finds the same.
  assert layout_digest(plan, ScheduleOptions(8, 2), base) not in digests
  again = layout_digest(fragment(SHAPES, num_fragments=2), SCHEDULE, base)
  assert again == digests[0]
  assert {len(digest) for digest in digests} == {64}
  fields = {field.name for field in dataclasses.fields(WireOptions)}
  assert {name for change in changes for name in change} == fields
