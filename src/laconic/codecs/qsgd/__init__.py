"""QSGD: levels of the largest entry, or of the norm, of each short block, rounded at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.qsgd.level_codings import CODINGS
from laconic.codecs.quantiser import Quantiser, check_norm, longest, variance
from laconic.core import arguments
from laconic.core.errors import WireError
from laconic.core.framing import as_bytes, as_numbers, read_bytes
from laconic.core.layout import Segments
from laconic.core.spec import Status
from laconic.kernels.quantise.form import Form, Measure


@dataclass(frozen=True, repr=False)
class QSGD(Quantiser):
    """QSGD (Alistarh et al. 2017, arXiv:1610.02132).

        z = norm(block);   a = s |x| / z;   level = floor(a) + (U < a - floor(a));   value = sign z level / s

    Levels 0, 1/s, ..., 1 of the `norm` of each `block` of B elements: 'max', as in the authors' experiments,
    or 'l2', as in their theory. s = `levels` is 1 to 32767; 7 levels take 4 bits.

    Wire: scales float32 (ceil(n / B),), then codes [sign | level] of 1 + bit_length(s) bits, padded to a
    byte; B = 0 makes the whole tensor one block. With `coding` 'rice' or 'elias' (the paper's), the scales of
    all tensors, then all levels (see `level_codings`). Error, with m the longest block: omega = (sqrt(1 + (m
    - 1) / s^2) - 1) / 2 for 'max'; for 'l2' sqrt(m) / s - 1 where that is at least 1, else m / (4 s^2).
    Unbiased. A high omega (a long block, few levels) makes error feedback diverge.

    >>> import torch
    >>> codec = QSGD(levels=4, block=0)
    >>> wire = codec.encode(torch.tensor([1.0, -0.5, 0.0, 0.25]))
    >>> wire.numel(), codec.decode(wire, 4).tolist()
    (6, [1.0, -0.5, 0.0, 0.25])
    """

    levels: int = 7
    block: int = 512
    norm: str = "max"
    coding: str = "fixed"

    unbiased: ClassVar[bool] = True
    paper: ClassVar[str] = "Alistarh et al. 2017, arXiv:1610.02132"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "fartashf/nuqsgd"
    examples: ClassVar[tuple[str, ...]] = (
        "qsgd()",
        "qsgd(levels=1, block=0, norm='l2', coding='rice')",
        "qsgd(levels=1, block=100)",
        "qsgd(levels=127, block=4096)",
        "qsgd(levels=5, block=0, norm='l2')",
        "qsgd(levels=1000, block=77, norm='l2')",
        "qsgd(levels=9, block=100, coding='rice')",
        "qsgd(levels=1, coding='elias')",
        "qsgd(levels=40, block=0, norm='l2', coding='elias')",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self.name, self.norm)
        arguments.choice("qsgd: coding", self.coding, ("fixed", *CODINGS))

    @property
    def fixed_size(self) -> bool:
        return self.coding == "fixed"

    @property
    def form(self) -> Form:
        return Form(self.levels, self.block)

    def measures(self, x: Tensor, segments: Segments) -> Measure:
        return Measure(self.norm)

    def omega(self, n: int) -> float:
        return variance.uniform(longest(n, self.block), self.levels, self.norm)

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        if self.fixed_size:
            return super().encode_segments(x, segments, keys)
        scales, levels = kernels.quantise_levels(x, segments, keys, self.form, self.measures(x, segments))
        body = CODINGS[self.coding].encode(levels, Segments.consecutive(segments.sizes), self.levels)
        return torch.cat([as_bytes(scales), body])

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        if self.fixed_size:
            return super().decode_segments_add_(wire, segments, out, alpha)
        head, body = read_bytes(wire, 4 * self.form.blocks(segments), "the scales")
        scales = as_numbers(head, torch.float32)
        if bool(torch.signbit(scales).any()) or not bool(torch.isfinite(scales).all()):
            raise WireError("a scale is negative or not finite")
        levels = CODINGS[self.coding].decode(body, Segments.consecutive(segments.sizes), self.levels)
        return kernels.levels_add_(levels, scales, segments, out, self.form, alpha)

    def nbytes(self, n: int) -> int:
        if self.fixed_size:
            return super().nbytes(n)
        return 4 * self.form.blocks_in(n) + CODINGS[self.coding].nbytes(n, self.levels)

    def message_nbytes(self, segments: Segments) -> int:
        """Return the size; an empty message has 4 bytes."""
        return super().message_nbytes(segments) + (0 if self.fixed_size else 4)
