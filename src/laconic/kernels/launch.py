"""Launch of Triton kernels with little work on the host.

Triton binds and specialises arguments at each launch, which takes longer than most kernels. Here only the
first launch with arguments of a kind does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

WORD = 1 << 31  # ints below it are i32 for Triton

_compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 8, **options: Any) -> None:
    """Launch `kernel[grid](*args, num_warps=num_warps, **options)` on the current GPU.

    `args`: all in order, including constexprs. Multiply-add is never fused.
    """
    options["enable_fp_fusion"] = False
    if not hasattr(kernel, "device_caches"):  # interpreted
        kernel[grid](*args, num_warps=num_warps, **options)
        return
    pairs = zip(args, _constants(kernel), strict=True)
    kinds = [(type(arg), arg) if constant else _kind(arg) for arg, constant in pairs]
    key = (id(kernel), num_warps, *options.values(), torch.cuda.current_device(), *kinds)
    found = _compiled.get(key)
    if found is None:
        _compiled[key] = kernel, kernel[grid](*args, num_warps=num_warps, **options)
    else:
        found[1][(*grid, 1, 1)[:3]](*args)


@cache
def _constants(kernel: Any) -> tuple[bool, ...]:
    return tuple(param.is_constexpr for param in kernel.params)


def _kind(value: Any) -> Any:
    """Return dtype and alignment, or size of an int: Triton specialises on these."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return float
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return 1 if value == 1 else (value % 16 == 0, -WORD <= value < WORD, value < WORD * WORD * 2)
