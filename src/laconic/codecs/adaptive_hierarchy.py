"""Adaptive hierarchy: as many groups of magnitudes as a tensor needs for a given error.

Jiang et al. 2022, arXiv:2212.14760, whose abstract speaks of hierarchies that follow the distribution of the
largest entries. Reconstruction: the measure of the error, the doubling and the wire are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.hierarchy import MOST, Hierarchy
from laconic.core import arguments
from laconic.core.errors import WireError
from laconic.core.framing import read_bytes
from laconic.core.spec import Status
from laconic.core.tensor_codec import TensorCodec


@dataclass(frozen=True, repr=False)
class AdaptiveHierarchy(TensorCodec):
    """`hierarchy(levels=L)` with the first L of 1, 2, 4, ... whose squared error is at most `error` * |x|^2,
    or with `most` levels where none is.

    Wire: L - 1 uint8, then the wire of `hierarchy(levels=L)`. Error: at most the larger of `error` and the
    omega of `hierarchy(levels=most)`.

    >>> codec = AdaptiveHierarchy(error=0.01)
    >>> [codec.encode(torch.tensor(x))[0].item() + 1 for x in ([2.0, 2.0, -2.0], [4.0, -1.0, 4.0, 1.0])]
    [1, 2]
    """

    error: float = 0.05
    most: int = 16

    fixed_size: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    paper: ClassVar[str] = "Jiang et al. 2022, arXiv:2212.14760"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = (
        "adaptive_hierarchy()",
        "adaptive_hierarchy(error=0.001, most=256)",
        "sparse(topk(density=0.05), values=adaptive_hierarchy(), indices=golomb())",
    )

    def __post_init__(self) -> None:
        arguments.number("adaptive_hierarchy: error", self.error, above=0, below=1)
        arguments.whole("adaptive_hierarchy: most", self.most, 1, MOST)

    def encode_tensor(self, x: Tensor, key: int) -> Tensor:
        bound = self.error * float(x.double().square().sum())
        levels = 1
        while True:
            codec = Hierarchy(levels)
            wire = codec.encode(x, key)
            lost = float((codec.decode(wire, x.numel()).double() - x.double()).square().sum())
            if lost <= bound or levels == self.most:
                return torch.cat([wire.new_tensor([levels - 1]), wire])
            levels = min(2 * levels, self.most)

    def decode_tensor(self, wire: Tensor, n: int) -> Tensor:
        head, rest = read_bytes(wire, 1, "the number of levels")
        levels = 1 + int(head)
        if levels > self.most:
            raise WireError(f"{self!r}: at most {self.most} levels are sent, got {levels}")
        return Hierarchy(levels).decode(rest.clone(), n)

    def nbytes(self, n: int) -> int:
        return 1 + Hierarchy(self.most).nbytes(n)

    def omega(self, n: int) -> float:
        return max(self.error, Hierarchy(self.most).omega(n)) if n else 0.0
