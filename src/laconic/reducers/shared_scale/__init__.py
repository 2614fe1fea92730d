"""Shared scale: all ranks round to steps of one size, so integer levels add up, in few bits each way.

TernGrad's scaler sharing (Wen et al. 2017, arXiv:1705.07878; the maximum as in the authors' release [V]) at
one level; QSGD with a shared norm (as "QSGDMaxNorm" of vineeths96/Gradient-Compression [V]) at more. Per
tensor, or per block of it, with ranks r = 0..N-1:

    1. s_r = min(max|x_r|, max(clip * sigma_r, rms_r))    sigma: population standard deviation of the tensor
    2. s = max over ranks of s_r                          one all_reduce
    3. l_r = levels * clamp(x_r / s, -1, 1), rounded up or down at random to an integer: E l_r is the argument
    4. all_to_all of the l_r of all tensors, in N chunks; each rank adds those of its chunk
    5. all_gather of the sums; mean = s / (levels * N) * sum of l_r, the same bits on all

The root mean square rms is ours: see `ternary`. Unbiased without clipping. A small gradient is rounded in the
largest rank's steps, an unbounded error that excludes error feedback; `gather(ternary())` has a scale per
rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.qsgd import QSGD
from laconic.codecs.quantiser import check_clip
from laconic.codecs.ternary import Ternary
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.comm.skippable import largest_or_skip
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.kernels.quantise.form import Form, Measure
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.shared_scale.sum_of_levels import SUM_BITS, integer_sum, integer_sum_nbytes

Norm = Literal["max", "l2"]


@dataclass(frozen=True, repr=False)
class SharedScale(Reducer):
    """mean = s / (levels * N) * sum of integer levels, for a scale s that is the ranks' largest.

    `clip`: maximum of a scale in standard deviations of its tensor, but not below its root mean square; 0
    does not clip. `block`: entries that share a scale; 0 for a whole tensor. `norm`: kind of scale, 'max'
    or 'l2'.

    Payload in bits per entry: (N-1)/N * bit_length(2 levels) up, 1/N * bit_length(2 N levels) down, and 32
    per scale: at one level 2.5 for 2 or 4 ranks.

    >>> SharedScale(levels=7, clip=0, block=512)
    shared_scale(levels=7, clip=0, block=512)
    """

    levels: int = 1
    clip: float = 2.5
    block: int = 0
    norm: Norm = "max"

    paper: ClassVar[str] = "Wen et al. 2017, arXiv:1705.07878"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "wenwei202/terngrad"
    examples: ClassVar[tuple[str, ...]] = (
        "shared_scale()",
        "shared_scale(clip=0)",
        "shared_scale(levels=7, clip=0, block=64)",
        "shared_scale(levels=100, clip=0, block=0, norm='l2')",
    )

    def __post_init__(self) -> None:
        arguments.choice("shared_scale: norm", self.norm, get_args(Norm))
        check_clip(self.name, self.clip)
        _ = self.form  # rejects values that a wire cannot have
        if self.clip and (self.block or self.norm != "max"):
            raise SpecError(
                f"clip={self.clip} limits the largest entry of a whole tensor: with block={self.block} and"
                f" norm={self.norm!r} set clip=0"
            )

    @cached_property
    def form(self) -> Form:
        return Form(self.levels, self.block)

    @cached_property
    def measure(self) -> Measure:
        return Measure(self.norm, self.clip)

    @property
    def unaccountable(self) -> str | None:
        return "a rank's error depends on the largest rank's scale, however small its own gradient is"

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        if (2 * self.levels * comm.size).bit_length() > SUM_BITS:
            raise SpecError(
                f"levels={self.levels} of {comm.size} ranks add up to over 2^29: use fewer levels"
            )
        return _SharedScale(self, comm)

    def scales(self, layout: Layout) -> int:
        return self.form.blocks(layout.segments)

    def nbytes(self, layout: Layout) -> int:
        return 4 * max(1, self.scales(layout)) + integer_sum_nbytes(layout.numel, 2 * self.levels)

    def feedback_codec(self) -> Codec:
        """Return the codec with the same error if all ranks have one scale; smaller scales err more."""
        ternary = self.levels == 1 and not self.block and self.norm == "max"
        return Ternary(self.clip) if ternary or self.clip else QSGD(self.levels, self.block, self.norm)


@dataclass(frozen=True)
class Levels(Sent):
    spec: SharedScale
    wire: Tensor
    scales: Tensor
    segments: Segments

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        return kernels.packed_levels_add_(self.wire, self.scales, self.segments, x, self.spec.form, alpha)

    def clear_(self, memory: Tensor) -> Tensor:
        return self.segments.zero_(memory)


@dataclass(frozen=True)
class _SharedScale(BoundReducer):
    spec: SharedScale
    comm: Comm
    detects_non_finite: ClassVar[bool] = True

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        spec, form, size, segments = self.spec, self.spec.form, self.comm.size, layout.segments
        own = None if x is None else kernels.norms(x, segments, spec.measure, spec.block)
        scales = largest_or_skip(self.comm, own, spec.scales(layout), out.device)
        if x is None or scales is None:
            return None
        keys = turn.own_keys(layout.names)
        given = Measure(scales=scales, unsigned=True)
        _, levels = kernels.quantise_levels(x, segments, keys, form, given)
        wire = kernels.pack_levels(levels, spec.levels)
        sums = integer_sum(wire, segments.numel, 2 * spec.levels, self.comm)
        each = scales / _number(size, scales.device)  # divide first: size * scale can overflow
        kernels.packed_levels_(sums, each, segments, out, form, alpha, ranks=size)
        return Levels(spec, wire, scales, segments)


@lru_cache(maxsize=64)
def _number(size: int, device: torch.device) -> Tensor:
    """Return float32 (): CUDA multiplies by a Python number's reciprocal."""
    return torch.tensor(size, dtype=torch.float32, device=device)  # a blocking copy: other streams may use it
