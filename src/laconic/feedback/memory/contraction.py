"""Which codecs error feedback can carry.

With E|C(x) - x|^2 <= omega |x|^2 the residual stays bounded where omega < 1 (Karimireddy et al. 2019,
arXiv:1901.09847), or where the error has a bound of its own. Otherwise it can grow without limit: measured,
unbucketed 7-level QSGD at n = 12,545 grew it to 32,700 times the gradient in 40 steps. For an unbiased C,
C / (1 + omega) is a contraction, at the price of smaller steps.

Omega is about elements in the codec's normal range (`Codec.normal`). Larger ones are cut, and their rest
stays in the residual until later steps have sent it: bounded too, while gradients are within the range.
"""

from __future__ import annotations

import math

from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout


def safe_gain(codec: Codec | None, layout: Layout, damped: bool = False) -> float:
    """The factor on the decoded mean: 1, or 1 / (1 + omega) where damped. Raises `SpecError` for the rest."""
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
        raise SpecError(f"only an unbiased codec with a finite omega can be damped, {codec!r} is not one")
    return 1 / (1 + worst)
