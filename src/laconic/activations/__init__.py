"""Compressed activations: layer inputs are saved for backward as encoded bytes and masks as bits."""

from laconic.activations.compress import Coding as Coding
from laconic.activations.compress import compress as compress
from laconic.activations.measure import measure as measure

__all__ = ["Coding", "compress", "measure"]
