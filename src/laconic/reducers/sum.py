"""Sum: the dense mean by all-reduce, the baseline of all other methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.cast import Cast
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.comm.skippable import NonFiniteSum, largest_of, max_or_skip, not_finite
from laconic.core import arguments, deferred
from laconic.core.codec import Codec
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, Reducer

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BLOCK = 1 << 18  # elements rounded at a time, for the cache
FINEST = 100  # largest exponent k of a scale 2^k: 2^-k / N is normal


@dataclass(frozen=True, repr=False)
class Sum(Reducer):
    """Mean of x over ranks, added in `dtype`: 'fp32' (exact up to rounding), 'fp16' or 'bf16'.

    Payload: 4 or 2 bytes per element, and 4 bytes more for 'fp16'. In 'fp16' all ranks scale x by a power of
    two such that N times M, the largest |x| of all ranks, just fits: each addition loses at most 2^-11 of an
    entry, or 2^-40 N M if that is more (M > 1e-24). In 'bf16' each rank divides by N before rounding, and
    saturates where the sum could overflow. In 'fp32' an overflowing sum skips the step.

    >>> Sum(dtype="fp16")
    sum(dtype='fp16')
    """

    status: ClassVar[Status] = "own"

    dtype: str = "fp32"

    examples: ClassVar[tuple[str, ...]] = ("sum()", "sum(dtype='fp16')", "sum(dtype='bf16')")

    def __post_init__(self) -> None:
        arguments.choice("sum: dtype", self.dtype, tuple(DTYPES))

    def bind(self, layout: Layout, comm: Comm) -> BoundSum:
        return BoundSum(DTYPES[self.dtype], comm)

    def nbytes(self, layout: Layout) -> int:
        return DTYPES[self.dtype].itemsize * layout.numel + 4 * (self.dtype == "fp16")

    def feedback_codec(self) -> Codec | None:
        return None if self.dtype == "fp32" else Cast(self.dtype)


@dataclass(frozen=True)
class DenseShare(Sent):
    """Dense share: `kept` (n,), times `gain`, on the segments.

    Without `kept`, x was `out`, and the mean has overwritten it. Otherwise it is a copy: x, a residual, may
    change before this share is subtracted.
    """

    segments: Segments
    kept: Tensor | None
    gain: float

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        if self.kept is None:
            raise ValueError("this share was overwritten by the mean; to keep it, reduce into another `out`")
        if len(self.segments):
            parts = _split(self.kept, self.segments)
            torch._foreach_add_(self.segments.views(x), parts, alpha=alpha * self.gain)
        return x

    def clear_(self, memory: Tensor) -> Tensor:
        return self.segments.zero_(memory)


@dataclass(frozen=True)
class BoundSum(BoundReducer):
    """Reduction without state between steps.

    `late`: on a GPU, `deferred.check` raises `NonFiniteSum`, for a caller inside `deferred()`.
    """

    dtype: torch.dtype
    comm: Comm
    late: bool = False

    @property
    def detects_non_finite(self) -> bool:
        """True in float32 (checks the mean) and float16 (the maximum); bfloat16 would saturate Inf."""
        return self.dtype != torch.bfloat16

    @property
    def checks_mean(self) -> bool:
        return True

    @property
    def overlaps(self) -> bool:
        return True

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        return self.begin(x, layout, turn, out, alpha)()

    def begin(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Callable[[], Sent | None]:
        runs = layout.segments.merged
        exact = self.dtype == torch.float32
        in_place = exact and len(runs) == 1 and runs.numel > 0
        found = self._range(x, runs, out.device)
        if found is None:
            return _nothing
        factor, most = found
        if in_place:
            buffer = runs.views(out)[0]
        elif x is None or out.is_cpu or not runs.numel:
            # even an empty tensor can report a non-finite x
            buffer = torch.zeros(max(1, runs.numel), dtype=self.dtype, device=out.device)
        else:
            buffer = self._packed(x, runs, factor, most)
        if x is None:
            apart = False
            buffer.fill_(torch.nan)
        else:
            apart = x is not out  # a view of the same memory only costs a copy
            if in_place and apart:
                buffer.copy_(runs.views(x)[0])
            elif out.is_cpu and not in_place and runs.numel:
                self._pack_(buffer, x, runs, factor, most)
        share = DenseShare(runs, buffer.clone() if apart else None, 1 / factor)
        wait = self.comm.begin_all_reduce(buffer)

        def end() -> Sent | None:
            wait()
            scale = alpha / self.comm.size / factor
            if not runs.numel:
                return share if bool(buffer.isfinite().all()) else None
            if out.is_cpu:
                if not in_place:
                    torch._foreach_copy_(runs.views(out), _split(buffer, runs))
                return share if kernels.all_finite(runs.scale_(out, scale), runs) else None
            mean = buffer.to(torch.float32)
            if scale != 1:
                mean.mul_(scale)
            if not in_place:
                torch._foreach_copy_(runs.views(out), _split(mean, runs))
            return share if self._is_finite(mean) else None

        return end

    def _is_finite(self, mean: Tensor) -> bool:
        if not self.late:
            return math.isfinite(largest_of([mean]).item())
        deferred.check(not_finite(mean), lambda _: NonFiniteSum())
        return True

    def _range(self, x: Tensor | None, runs: Segments, device: torch.device) -> tuple[float, float] | None:
        size, limit = self.comm.size, _limit(self.dtype, self.comm.size)
        if self.dtype == torch.float32:
            return 1.0, math.inf
        if self.dtype == torch.bfloat16:
            return 1 / size, limit
        own = None if x is None else _largest(x, runs)
        shared = max_or_skip(self.comm, own, 1, device)
        if shared is None:
            return None
        growth = (1 + torch.finfo(self.dtype).eps) ** (size + 1)  # rounding
        largest = min(float(shared), torch.finfo(torch.float32).max / growth)
        power = math.frexp(limit / largest)[1] - 1 if largest else 0
        factor = 2.0 ** min(power, FINEST)
        return factor, largest * factor

    def _packed(self, x: Tensor, runs: Segments, factor: float, most: float) -> Tensor:
        if self.dtype == torch.float32:
            return torch.cat(runs.views(x))
        return (runs.gathered(x) * factor).clamp_(-most, most).to(self.dtype)

    def _pack_(self, buffer: Tensor, x: Tensor, runs: Segments, factor: float, most: float) -> None:
        if self.dtype == torch.float32:
            torch._foreach_copy_(_split(buffer, runs), runs.views(x))
            return
        for view, part in zip(runs.views(x), _split(buffer, runs), strict=True):
            for block, rounded in zip(torch.split(view, BLOCK), torch.split(part, BLOCK), strict=True):
                rounded.copy_((block * factor).clamp_(-most, most))


def _nothing() -> None:
    """Finish a sum of a skipped step."""


def _largest(x: Tensor, runs: Segments) -> Tensor:
    views = [view for view in (runs.views(x) if x.is_cpu else [runs.gathered(x)]) if len(view)]
    ends = [torch.stack(torch.aminmax(view)).abs().amax() for view in views]
    return torch.stack([x.new_zeros(()), *ends]).amax().reshape(1)


def _limit(dtype: torch.dtype, size: int) -> float:
    """Return the largest value that can be added and rounded `size` times without overflow."""
    info = torch.finfo(dtype)
    return float(info.max / size / (1 + info.eps) ** size)


def _split(buffer: Tensor, runs: Segments) -> tuple[Tensor, ...]:
    return buffer[: runs.numel].split_with_sizes(runs.sizes)
