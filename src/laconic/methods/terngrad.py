"""TernGrad: every entry of a gradient is +1, -1 or 0, times one scale per tensor.

Wen et al. 2017, arXiv:1705.07878. Clipping, the maximum of the scales and float32 for small tensors follow
the authors' release (wenwei202/terngrad), as does `last_layer='fp32'`, not the default.
"""

from __future__ import annotations

from typing import Literal

from laconic.codecs.quantiser import check_clip
from laconic.codecs.ternary import Ternary
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.layout import Entry, Layout
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.reducers import Reducer
from laconic.reducers.gather import Gather
from laconic.reducers.shared_scale import SharedScale
from laconic.reducers.sum import Sum

Scale = Literal["shared", "own"]
Last = Literal["ternary", "fp32"]


@method(
    paper="Wen et al. 2017, arXiv:1705.07878",
    status="verified",
    code="wenwei202/terngrad",
    sends="the sign of some entries, at random in proportion to their size, and a scale",
    examples=("terngrad()", "terngrad(scale='own', packing='base3', last_layer='fp32')"),
)
def terngrad(
    clip: float = 2.5,
    *,
    scale: Scale = "shared",
    last_layer: Last = "ternary",
    small: int = 256,
    packing: str = "bits",
) -> Method:
    """Per tensor of two dimensions and more, on each of N ranks, with population standard deviation sigma:

        s = min(max|g|, max(clip * sigma, rms)), and then the maximum over ranks
        t = sign(g) with probability min(|g| / s, 1), else 0
        mean = s / N * (sum over ranks of t)

    The root mean square rms is ours (see `ternary`). There is no feedback: apart from entries beyond `clip`,
    the error has mean zero. One-dimensional tensors are summed uncompressed.

    Payload: 4 bytes per tensor, and per entry 2 bits, or with a shared scale 2 (N-1)/N bits up and
    ceil(log2(2N + 1)) / N bits of sums back.

    Args:
        clip: Limit of entries in standard deviations; 0: no clipping.
        scale: "shared"; or "own": ranks keep their scales and gather all messages, for gradients of
            different size.
        last_layer: "ternary", or "fp32": the model's last matrix is not compressed.
        small: Tensors with fewer elements are not compressed.
        packing: "bits", 2 bits per entry, or with `scale='own'` "base3", 1.6 bits.

    Raises:
        SpecError: An argument is invalid, or packing='base3' without scale='own'.

    >>> terngrad(last_layer="fp32")
    terngrad(last_layer='fp32')
    """
    check_clip("terngrad", clip)
    arguments.choice("terngrad: scale", scale, ("shared", "own"))
    arguments.choice("terngrad: last_layer", last_layer, ("ternary", "fp32"))
    arguments.choice("terngrad: packing", packing, ("bits", "base3"))
    arguments.whole("terngrad: small", small)
    reducer: Reducer
    if scale == "own":
        reducer = Gather(Ternary(clip=clip, packing=packing))
    elif packing != "bits":
        raise SpecError(f"packing={packing!r} needs messages with their own scale: set scale='own'")
    else:
        reducer = SharedScale(clip=clip)

    def is_ternary(entry: Entry, model: Layout) -> bool:
        if not matrices(entry, model) or entry.numel < small:
            return False
        return last_layer == "ternary" or entry != last_matrix(model)

    return routes(Route(is_ternary, reducer), Route(everything, Sum()))


def last_matrix(model: Layout) -> Entry | None:
    return next((entry for entry in reversed(model.entries) if matrices(entry, model)), None)
