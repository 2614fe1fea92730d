"""Codecs that are safe with error feedback.

With E|C(x) - x|^2 <= omega |x|^2 the residual stays bounded if omega < 1 (Karimireddy et al. 2019,
arXiv:1901.09847), or if the error has an absolute bound. Otherwise it can grow without limit, as it did for
unbucketed QSGD. For an unbiased C, C / (1 + omega) is a contraction, at the price of smaller steps. Omega
holds in `Codec.normal`; larger elements saturate.
"""

from __future__ import annotations

import math

from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout


def safe_gain(codec: Codec | None, layout: Layout, damped: bool = False) -> float:
    """Return the decoded mean's factor: 1, or 1 / (1 + omega) if damped. Raises `SpecError` if unsafe."""
    if codec is None or not len(layout):
        return 1.0
    sizes = [entry.numel for entry in layout]
    worst = max(codec.omega(n) for n in sizes)
    if worst < 1 or all(codec.absolute_error(n) is not None for n in sizes):
        return 1.0
    if not damped:
        can = codec.unbiased and not math.isinf(worst)
        raise SpecError(
            f"error feedback diverges with {codec!r}: omega must be below 1, it is {worst:.4g} for a"
            f" tensor of {max(sizes)} elements; use smaller buckets or more levels"
            + (f", or another method: error_fed({codec!r}, damped=True)" if can else "")
        )
    if not codec.unbiased or math.isinf(worst):
        raise SpecError(f"damped=True requires an unbiased codec with a finite omega, got {codec!r}")
    return 1 / (1 + worst)
