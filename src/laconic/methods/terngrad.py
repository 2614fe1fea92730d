"""TernGrad: every entry of a gradient as plus, minus or nothing, times one scale a tensor.

Wen et al. 2017, arXiv:1705.07878. Clipping, the maximum of the scales, small tensors and a last layer in
float32 as in the authors' release (wenwei202/terngrad) [V]. It reports no loss for AlexNet and less than 2
points for GoogLeNet on ImageNet [abstract]; CIFAR-10 with Adam 85.64 % against 86.56 in float32 [recalled].
"""

from __future__ import annotations

from typing import Literal

from laconic.codecs.quantiser import check_clip
from laconic.codecs.ternary import Ternary
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.layout import Entry, Layout
from laconic.reducers.gather import Gather
from laconic.reducers.reducer import Reducer
from laconic.reducers.shared_scale import SharedScale
from laconic.reducers.sum import Sum
from laconic.strategies.method import Method, Route, everything, matrices, method, routes

Scale = Literal["shared", "own"]
Last = Literal["ternary", "fp32"]


@method(
    paper="Wen et al. 2017, arXiv:1705.07878",
    status="verified",
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
    """Per tensor of two dimensions and more, on each of N ranks, sigma its population standard deviation:

        s = min(max|g|, max(clip * sigma, rms)), and of that the maximum over ranks
        t = sign(g) with probability min(|g| / s, 1), else 0
        mean = s / N * (sum over ranks of t)

    The root mean square rms, sigma where the mean is 0, is ours (see `ternary`).

    No feedback: what is not sent is noise of mean zero, but for what `clip` cuts off (0 cuts nothing). Any
    optimiser, momentum and all, takes the mean. `scale='own'`: each rank keeps its own scale and all gather
    all messages, for ranks whose gradients differ much in size; `packing='base3'` then has 1.6 bits an entry.
    Tensors of one dimension or of fewer elements than `small`, and with `last_layer='fp32'` the last matrix
    of the model, are summed as they are.

    Payload: 2 bits an entry and 4 bytes a tensor; with a shared scale (N-1)/N * 2 bits up and 1/N *
    log2(2N + 1), rounded up, down.

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
        raise SpecError(f"packing={packing!r} is of messages with a scale of their own: set scale='own'")
    else:
        reducer = SharedScale(clip=clip)

    def is_ternary(entry: Entry, model: Layout) -> bool:
        if not matrices(entry, model) or entry.numel < small:
            return False
        return last_layer == "ternary" or entry != last_matrix(model)

    return routes(Route(is_ternary, reducer), Route(everything, Sum()))


def last_matrix(model: Layout) -> Entry | None:
    """The weight of a model's last layer: the last tensor of two dimensions and more."""
    return next((entry for entry in reversed(model.entries) if matrices(entry, model)), None)
