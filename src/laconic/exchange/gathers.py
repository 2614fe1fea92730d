"""A warning where a gather would send more than dense: its messages go to each of N - 1 ranks.

A dense all-reduce sends 2(N-1)/N of the gradient, a gather N - 1 messages, so a message of m bits an element
is worth gathering among fewer than 64 / m ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from laconic.codecs.selectors.density_schedule import has_density
from laconic.codecs.sparse import Sparse
from laconic.comm.mesh import ranks_beside
from laconic.comm.wire_model import all_gather_bytes, all_reduce_bytes
from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.warning import warn
from laconic.exchange.method import Method
from laconic.reducers import Reducer
from laconic.reducers.dense_first import DenseFirst
from laconic.reducers.gather import Gather
from laconic.reducers.masked import Masked
from laconic.reducers.two_level import TwoLevel

SAMPLE = 1 << 16  # elements: enough to tell the bits of a codec whose messages differ in length
WAY_OUT = "scatter_reduce(codec), as in cgx(), or server(codec, codec) send as much in a group of any size"
BETWEEN = ", and two_level(sum(), gather(codec)) gathers between machines only"


def warn_of_gathers(method: Method, layout: Layout, size: int) -> None:
    """Warn of each of `costly_gathers`."""
    for told in costly_gathers(method, layout, size):
        warn(told)


def costly_gathers(method: Method, layout: Layout, size: int) -> Iterator[str]:
    """In words, where a rank of `size` would gather more bytes than a dense all-reduce would send.

    Inside `two_level` each level is compared with a dense one of its own, inside `masked` all entries are
    taken to be in use: of fewer, both send fewer. Not where the length of messages depends on the gradients'
    magnitudes, as with `threshold`.
    """
    for route, part in zip(method.routes, method.assign(layout), strict=True):
        for gathering in gatherings(route.reducer, size):
            message = message_bytes(gathering.codec.at(method.warm_at), part)
            if message is None:
                continue
            sent, dense = (
                all_gather_bytes(message, gathering.size),
                all_reduce_bytes(4 * part.numel, gathering.size),
            )
            if sent > 1.001 * dense:
                yield (
                    f"{method} sends each message to all other {gathering.whom}: among {gathering.size} that"
                    f" is {sent / 1e6:.3g} MB from each in an exchange, where a dense all-reduce sends"
                    f" {dense / 1e6:.3g} MB; {WAY_OUT}{BETWEEN if gathering.whom == 'ranks' else ''}"
                )


@dataclass(frozen=True)
class Gathering:
    """A gather with this codec, after its warm-up, among `size` of `whom`."""

    codec: Codec
    size: int
    whom: str = "ranks"


def gatherings(reducer: Reducer, size: int) -> Iterator[Gathering]:
    """The gathers in this reducer in a group of `size`; none in most reducers."""
    if isinstance(reducer, Gather):
        yield Gathering(reducer.codec, size)
    elif isinstance(reducer, DenseFirst):
        yield from gatherings(reducer.then, size)
    elif isinstance(reducer, Masked):
        yield from gatherings(reducer.reducer, size)
    elif isinstance(reducer, TwoLevel):
        inside = ranks_beside(reducer.ranks_per_node)
        for each in gatherings(reducer.inner, inside):
            yield replace(each, whom="ranks of the machine")
        for each in gatherings(reducer.between, -(-size // inside)):
            yield replace(each, whom="machines' first ranks")


def message_bytes(codec: Codec, layout: Layout) -> float | None:
    """Bytes of a message of these tensors: exact or of normal noise; None if magnitudes decide."""
    if codec.fixed_size:
        return codec.message_nbytes(layout.segments)
    if isinstance(codec, Sparse) and not has_density(codec.select):
        return None
    noise = torch.randn(
        min(layout.numel, SAMPLE),
        generator=torch.Generator("cpu").manual_seed(0),
        dtype=torch.float32,
        device="cpu",
    )
    return codec.encode(noise).numel() / max(len(noise), 1) * layout.numel
