"""Natural dithering: levels at powers of 2 of the largest entry, rounded at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.codecs.quantiser import Quantiser, check_norm, longest, variance
from laconic.core.layout import Segments
from laconic.core.spec import Status
from laconic.kernels.quantise.form import Form, Measure


@dataclass(frozen=True, repr=False)
class NaturalDithering(Quantiser):
    """Natural dithering (Horvath et al. 2019, arXiv:1905.10988).

    Levels 0, 2^(1 - s), ..., 1/2, 1 of the `norm` of each `block`, s = `levels`. This has the same
    distribution as dithering to 2^(s - 1) uniform levels, then natural compression.

    Wire: as `qsgd`; 1 to 127 levels. Error, with m the longest block and t = 2^(1 - s): omega = max(1/8,
    (sqrt(1 + (m - 1) t^2) - 1) / 2) for 'max'; for 'l2', with r = t sqrt(m), r - 1 where r >= 9/4, else 1/8 +
    2/9 r^2. Unbiased.

    >>> import torch
    >>> codec = NaturalDithering(levels=3)
    >>> wire = codec.encode(torch.tensor([1.0, -0.5, 0.0, 0.25]))
    >>> wire.numel(), codec.decode(wire, 4).tolist()
    (6, [1.0, -0.5, 0.0, 0.25])
    """

    levels: int = 7
    norm: str = "max"
    block: int = 0

    unbiased: ClassVar[bool] = True
    paper: ClassVar[str] = "Horvath et al. 2019, arXiv:1905.10988"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "SamuelHorvath/Compressed_SGD_PyTorch"
    examples: ClassVar[tuple[str, ...]] = (
        "natural_dithering()",
        "natural_dithering(levels=8, block=100)",
        "natural_dithering(levels=2, norm='l2')",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self.name, self.norm)

    @property
    def form(self) -> Form:
        return Form(self.levels, self.block, grid="powers")

    def measures(self, x: Tensor, segments: Segments) -> Measure:
        return Measure(self.norm)

    def omega(self, n: int) -> float:
        return variance.powers(longest(n, self.block), self.levels, self.norm)
