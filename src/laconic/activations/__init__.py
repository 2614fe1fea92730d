"""Less memory for what backward needs: inputs of layers as coded bytes, masks as bits."""

from laconic.activations.coding import Coding as Coding
from laconic.activations.compress import compress as compress
from laconic.activations.measure import measure as measure

__all__ = ["Coding", "compress", "measure"]
