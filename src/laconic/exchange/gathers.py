"""Warnings about gathers that send more than a dense all-reduce.

A gather sends N - 1 messages, the all-reduce 2(N-1)/N of the gradient: m bits per element are worth gathering
among fewer than 64 / m ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from laconic.comm.wire_model import all_gather_bytes, all_reduce_bytes
from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.warning import warn
from laconic.exchange.method import Method

SAMPLE = 1 << 16  # elements, to estimate the bits of a codec whose messages vary in length
ALTERNATIVES = (
    "scatter_reduce(codec), as in cgx(), or server(codec, codec) send as much in a group of any size"
)
BETWEEN = ", and two_level(sum(), gather(codec)) gathers between machines only"


def warn_of_gathers(method: Method, layout: Layout, size: int) -> None:
    for text in expensive_gathers(method, layout, size):
        warn(text)


def expensive_gathers(method: Method, layout: Layout, size: int) -> Iterator[str]:
    """Yield a text for each gather in which a rank sends more than in a dense all-reduce.

    `two_level` is compared level by level, `masked` with all entries in use.
    """
    for route, part in zip(method.routes, method.assign(layout), strict=True):
        for each in route.reducer.gathers(size):
            message = message_bytes(each.codec.at(method.warm_at), part)
            if message is None:
                continue
            sent, dense = all_gather_bytes(message, each.size), all_reduce_bytes(4 * part.numel, each.size)
            if sent > 1.001 * dense:
                yield (
                    f"{method} sends each message to all other {each.members}: among {each.size} that"
                    f" is {sent / 1e6:.3g} MB from each in an exchange, where a dense all-reduce sends"
                    f" {dense / 1e6:.3g} MB; {ALTERNATIVES}{BETWEEN if each.members == 'ranks' else ''}"
                )


def message_bytes(codec: Codec, layout: Layout) -> float | None:
    """Return a message's bytes, exact or for normal noise; None if they depend on the scale."""
    if codec.fixed_size:
        return codec.message_nbytes(layout.segments)
    if codec.scale_decides_size:
        return None
    rng, n = torch.Generator("cpu").manual_seed(0), min(layout.numel, SAMPLE)
    noise = torch.randn(n, generator=rng, dtype=torch.float32, device="cpu")
    return codec.encode(noise).numel() / max(n, 1) * layout.numel
