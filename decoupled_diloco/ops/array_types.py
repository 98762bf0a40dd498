"""Names for the arrays that cross function boundaries in `ops/`.

The axis letters are defined here and nowhere else:

| axis      | meaning                                                       |
|-----------|---------------------------------------------------------------|
| `learner` | one entry per learner; leads every leaf of stacked deltas     |
| `*leaf`   | the axes of one parameter leaf, or of one piece of it         |
| `block`   | blocks of consecutive values that share one scale             |
| `value`   | values inside one block                                       |
| `code`    | packed codes, in wire order                                   |
"""

from typing import Any, TypeAlias

from jaxtyping import (
  Array,
  BFloat16,
  Float,
  Float32,
  PyTree,
  Shaped,
  UInt8,
)

Params: TypeAlias = PyTree[Array]
"""Parameters, deltas or updates of one model copy."""
StackedParams: TypeAlias = PyTree[Array]
"""The same, and every leaf has a leading `learner` axis."""
PieceValues: TypeAlias = tuple[Array, ...]
"""The values of one fragment, in the order of `FragmentPlan.pieces(p)`."""
ShapeTree: TypeAlias = PyTree[Any]
"""Anything whose leaves have `.shape` and `.dtype`."""

Leaf: TypeAlias = Float[Array, '*leaf']
AnyLeaf: TypeAlias = Shaped[Array, '*leaf']
StackedLeaf: TypeAlias = Float[Array, 'learner *leaf']
Weights: TypeAlias = Float[Array, 'learner']
Scalar: TypeAlias = Float[Array, '']

Flat: TypeAlias = Float32[Array, ' value']
Blocks: TypeAlias = Float32[Array, 'block value']
BlockCodes: TypeAlias = UInt8[Array, 'block value']
BlockScales: TypeAlias = Float32[Array, 'block 1']
Codes: TypeAlias = Shaped[Array, ' code']
Scales: TypeAlias = BFloat16[Array, ' block']
