"""Random bits from a key and a position (Philox4x32-10), without state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.turn import MASK
from laconic.kernels import dispatch
from laconic.kernels.philox import reference
from laconic.kernels.philox.reference import CPU


def _check(n: int, offset: int) -> None:
    if n < 0 or offset < 0:
        raise ValueError(f"n and offset must not be negative, got n={n}, offset={offset}")


def philox(key: int, n: int, offset: int = 0, device: torch.device = CPU) -> Tensor:
    """Return 32-bit words [offset, offset + n) of a 64-bit key's stream, as bits of int32 (n,).

    >>> philox(0, 2).tolist()
    [1713891541, -513161843]
    """
    _check(n, offset)
    out = torch.empty(n, dtype=torch.int32, device=device)
    if (native := dispatch.native(out)) is not None:
        native.philox(out, key & MASK, offset)
        return out
    return reference.philox(key & MASK, n, offset, device)


def uniform(key: int, n: int, offset: int = 0, device: torch.device = CPU) -> Tensor:
    """Return uniform float32 (n,) in [0, 1): the top 24 bits of `philox`."""
    _check(n, offset)
    out = torch.empty(n, dtype=torch.float32, device=device)
    if (native := dispatch.native(out)) is not None:
        native.uniform(out, key & MASK, offset)
        return out
    if dispatch.gpu(out):
        from laconic.kernels.philox import gpu

        return gpu.uniform(key, n, out.device, offset)
    return reference.uniform(key & MASK, n, offset, device)


def dither24(key: int, n: int, offset: int = 0, device: torch.device = CPU) -> Tensor:
    """Return uniform integers int32 (n,) in [0, 2^24): elements [offset, offset + n) of a key's dither.

    A fraction f is rounded up where its element is below trunc(f * 2^24).

    >>> dither24(0, 2).tolist()
    [15259035, 6694877]
    """
    _check(n, offset)
    out = torch.empty(n, dtype=torch.int32, device=device)
    if (native := dispatch.native(out)) is not None:
        native.dither24(out, key & MASK, offset)
        return out
    if dispatch.gpu(out):
        from laconic.kernels.philox import gpu

        return gpu.dithers24([key], [n], out.device, offset)
    return reference.dither24(key & MASK, n, offset, device)


def dithers24(keys: Sequence[int], sizes: Sequence[int], device: torch.device = CPU) -> Tensor:
    """Return the dither of several tensors, int32 (sum(sizes),): elements [0, size) of each key.

    >>> dithers24([0, 0], [1, 2]).tolist()
    [15259035, 15259035, 6694877]
    """
    if len(keys) != len(sizes) or min(sizes, default=0) < 0:
        raise ValueError(f"a key and a size of 0 or more for each tensor, got {len(keys)} keys and {sizes}")
    out = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    if (native := dispatch.native(out)) is not None:
        for key, part in zip(keys, torch.split(out, list(sizes)), strict=True):
            native.dither24(part, key & MASK, 0)
        return out
    if dispatch.gpu(out):
        from laconic.kernels.philox import gpu

        return gpu.dithers24(keys, sizes, out.device)
    return reference.dithers24([key & MASK for key in keys], sizes, device)
