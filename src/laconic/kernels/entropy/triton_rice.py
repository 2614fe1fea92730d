# mypy: disable-error-code="no-untyped-def, untyped-decorator, unused-ignore"
"""Rice parameter in Triton."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]


@triton.jit
def rice_parameter(k, n):
    """Return the number of r with 320 k 2^r < 77 (2 n - k)."""
    most = 77 * (2 * n - k) - 1
    r = tl.zeros_like(k)
    for shift in tl.static_range(31):
        r += ((most >> shift) >= 320 * k).to(tl.int64)
    return tl.where(k > 0, r, 0)
