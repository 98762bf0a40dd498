"""Models in Flax, and Flax modules as pure functions."""

from decoupled_diloco.models.sampling import SamplingOptions as SamplingOptions
from decoupled_diloco.models.sampling import sample as sample
from decoupled_diloco.models.transformer import Transformer as Transformer
from decoupled_diloco.models.transformer import (
  TransformerOptions as TransformerOptions,
)
from decoupled_diloco.models.vit import Vit as Vit
from decoupled_diloco.models.vit import VitOptions as VitOptions
