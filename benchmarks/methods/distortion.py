"""What a method's codecs lose of a gradient: |C(x) - x|^2 / |x|^2, its part that is bias, and the bound.

Means are over K = KEYS random keys; a codec that gives the same result with two keys is deterministic, so one
key is enough. With results C_k and their mean m, bias is |m - x|^2 minus the noise of m, which is
sum_k |C_k - m|^2 / (K (K - 1)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.turn import mix
from laconic.exchange.method import Method
from laconic.tools.cli.entries import codec_of

KEYS = 64


@dataclass(frozen=True)
class Distortion:
    """Squared errors relative to |x|^2. `absolute`: the bound is of the absolute kind, on some tensor."""

    error: float
    bias: float
    bound: float
    absolute: bool


def distortion(method: Method, x: Tensor, layout: Layout, step: int, keys: int = KEYS) -> Distortion | None:
    """Of flat x float32 (n,), route by route; None where a route says of no codec that it makes the error."""
    energy = float(x.double().square().sum())
    error = bias = bound = 0.0
    absolute = False
    for route, part in zip(method.routes, method.assign(layout), strict=True):
        codec = codec_of(route)
        if not len(part):
            continue
        if codec is None:
            return None
        lost, kept = spread(codec.at(step), x, part, keys)
        allowed = [limit(codec, view) for view in part.segments.views(x)]
        error, bias, bound = error + lost, bias + kept, bound + sum(most for most, _ in allowed)
        absolute = absolute or any(kind for _, kind in allowed)
    return Distortion(error / energy, bias / energy, bound / energy, absolute)


def limit(codec: Codec, x: Tensor) -> tuple[float, bool]:
    """The most that |C(x) - x|^2 may be on average, as declared, and whether by an absolute bound."""
    relative = codec.omega(x.numel()) * float(x.double().square().sum())
    absolute = codec.absolute_error(x.numel())
    if absolute is not None and absolute < relative:
        return absolute, True
    return relative, False


def spread(codec: Codec, x: Tensor, layout: Layout, keys: int) -> tuple[float, float]:
    """Mean over keys of |C(x) - x|^2 on these tensors, and |mean of C(x) - x|^2 without its noise."""
    segments = layout.segments
    given = torch.cat(segments.views(x)).double()
    total, squares = torch.zeros_like(given), 0.0
    error, first, drawn = 0.0, None, 0
    for key in range(keys):
        wire = codec.encode_segments(x, segments, [mix(key, i) for i in range(len(segments))])
        decoded = codec.decode_segments_add_(wire, segments, torch.zeros_like(x))
        off = torch.cat(segments.views(decoded)).double() - given
        if first is None:
            first = off
        elif drawn == 1 and torch.equal(off, first):
            break
        drawn, total = drawn + 1, total + off
        squares += float((off - first).square().sum())
        error += float(off.square().sum())
    assert first is not None
    mean = total / drawn
    noise = (squares / drawn - float((mean - first).square().sum())) / max(1, drawn - 1)
    return error / drawn, max(0.0, float(mean.square().sum()) - noise)
