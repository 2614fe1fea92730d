"""Accumulation of gradients in residuals."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.accumulate import reference


def all_finite(x: Tensor, segments: Segments) -> bool:
    """Return whether all entries of these ranges of x float32 (n,) are finite."""
    checks.buffer("x", x, segments)
    if (native := dispatch.native(x)) is not None:
        return bool(native.all_finite(x, segments))
    if dispatch.gpu(x):
        from laconic.kernels.accumulate import gpu

        return gpu.all_finite(x, segments)
    return reference.all_finite(x, segments)


def accumulate_(
    residual: Tensor,
    grad: Tensor,
    segments: Segments,
    scale: float = 1.0,
    decay: float = 1.0,
    keep: bool = False,
) -> bool:
    """Compute residual = decay * residual + scale * grad on the segments of float32 (n,), in place.

    An entry whose new value is not finite keeps its old one; the function then returns False. `keep`: write
    the old residual to `grad`, for `undo_`.

    >>> r, g = torch.ones(3), torch.tensor([1.0, 2.0, float("inf")])
    >>> accumulate_(r, g, Segments.whole(3), scale=0.5), r.tolist()
    (False, [1.5, 2.0, 1.0])
    """
    checks.buffer("residual", residual, segments)
    checks.buffer("grad", grad, segments)
    if (native := dispatch.native(residual, grad)) is not None:
        accumulate = native.accumulate_keeping_ if keep else native.accumulate_
        return bool(accumulate(residual, grad, segments, scale, decay))
    if dispatch.gpu(residual, grad):
        from laconic.kernels.accumulate import gpu

        return gpu.accumulate_(residual, grad, segments, scale, decay, keep)
    return reference.accumulate_(residual, grad, segments, scale, decay, keep)


def velocity_(
    velocity: Tensor,
    residual: Tensor,
    grad: Tensor,
    fresh: Tensor,
    segments: Segments,
    momentum: Tensor,
    scale: float = 1.0,
    nesterov: bool = False,
    ahead: float = 0.0,
) -> bool:
    """Apply DGC's momentum correction on the segments of float32 (n,); `momentum` is float32 (s,).

    With g = scale * grad, velocity u (in place) and residual v: heavy ball u = m u + g, fresh = v + u;
    Nesterov u = m (u + g), fresh = v + u + g. Then, with m <= 0.98 and where
    |v| > |u| / 4, fresh = fresh + ahead m / (1 - m) u, and u = (1 - ahead) u.

    `grad` gets the old velocity, for `undo_`; `fresh` may be the residual. An entry whose new u or v is not
    finite keeps both old ones; the function then returns False.
    """
    checks.buffer("velocity", velocity, segments)
    checks.buffer("residual", residual, segments)
    checks.buffer("grad", grad, segments)
    checks.buffer("fresh", fresh, segments)
    checks.per_segment("momentum", momentum, segments, torch.float32)
    arguments = velocity, residual, grad, fresh, segments, momentum, scale, nesterov, ahead
    if (native := dispatch.native(velocity, residual, grad, fresh)) is not None:
        return bool(native.velocity_(*arguments))
    if dispatch.gpu(velocity, residual, grad, fresh):
        from laconic.kernels.accumulate import gpu

        return gpu.velocity_(*arguments)
    return reference.velocity_(*arguments)


def undo_(memory: Tensor, grad: Tensor, segments: Segments) -> None:
    """Restore the memory from the values that `accumulate_` or `velocity_` wrote to `grad`.

    `grad` is infinite where the memory is unchanged.

    >>> r, g = torch.ones(2), torch.tensor([2.0, float("inf")])
    >>> accumulate_(r, g, Segments.whole(2), keep=True), r.tolist(), g.tolist()
    (False, [3.0, 1.0], [1.0, inf])
    >>> undo_(r, g, Segments.whole(2)); r.tolist()
    [1.0, 1.0]
    """
    runs = segments.merged
    for held, old in zip(runs.views(memory), runs.views(grad), strict=True):
        held.copy_(torch.where(old.isinf(), held, old))


def add_sparse_(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    """Add alpha * y, mostly zero, to x float32 (n,), in place.

    >>> add_sparse_(torch.ones(4), torch.tensor([0.0, 2.0, 0.0, -1.0]), alpha=0.5)
    tensor([1.0000, 2.0000, 1.0000, 0.5000])
    """
    checks.flat("x", x)
    checks.flat("y", y)
    if len(x) != len(y):
        raise ValueError(f"x and y must be equally long, got {len(x)} and {len(y)}")
    if (native := dispatch.native(x, y)) is not None:
        native.add_sparse_(x, y, alpha)
        return x
    return reference.add_sparse_(x, y, alpha)
