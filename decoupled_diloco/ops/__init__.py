"""Arithmetic of the method: jit-able JAX on pytrees, and nothing else.

The function `adopt` is left in `ops.adopt`: a name here would hide the module.
"""

from decoupled_diloco.ops.adopt import AdoptOptions as AdoptOptions
from decoupled_diloco.ops.codecs import Codec as Codec
from decoupled_diloco.ops.codecs import Encoded as Encoded
from decoupled_diloco.ops.codecs import codec as codec
from decoupled_diloco.ops.fragments import FragmentPlan as FragmentPlan
from decoupled_diloco.ops.fragments import fragment as fragment
from decoupled_diloco.ops.merge import merge_pieces as merge_pieces
from decoupled_diloco.ops.merge import pseudo_gradient as pseudo_gradient
from decoupled_diloco.ops.merge import radial_directional as radial_directional
from decoupled_diloco.ops.merge import weighted_mean as weighted_mean
from decoupled_diloco.ops.outer import FragmentOuter as FragmentOuter
from decoupled_diloco.ops.outer import OuterState as OuterState
from decoupled_diloco.ops.outer import fragment_outer as fragment_outer
from decoupled_diloco.ops.outer import from_gain as from_gain
from decoupled_diloco.ops.outer import outer_optimizer as outer_optimizer
from decoupled_diloco.ops.outer import outer_transform as outer_transform
from decoupled_diloco.ops.payloads import PieceLayout as PieceLayout
from decoupled_diloco.ops.payloads import encoded_nbytes as encoded_nbytes
from decoupled_diloco.ops.payloads import from_bytes as from_bytes
from decoupled_diloco.ops.payloads import payload_spec as payload_spec
from decoupled_diloco.ops.payloads import to_bytes as to_bytes
from decoupled_diloco.ops.pieces import Piece as Piece
