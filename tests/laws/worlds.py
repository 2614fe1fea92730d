"""A small world for laws: threads as ranks, a model's layout, gradients that differ by rank and step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Entry, Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from laconic.exchange.no_optimiser import NoOptimiser

MODEL = Layout.of(
    [("a.weight", (40, 30)), ("a.bias", (40,)), ("b.weight", (7, 90)), ("c.weight", (3, 3, 3, 3))]
)


class Settings(NoOptimiser):
    """An optimiser's side with fixed settings."""

    def __init__(
        self, momentum: float = 0.9, nesterov: bool = False, buffers: Mapping[str, Tensor] | None = None
    ):
        super().__init__({"lr": 0.1, "momentum": momentum, "nesterov": nesterov})
        self._buffers = dict(buffers or {})

    def give(self, name: str, buffer: Tensor) -> None:
        self._buffers[name] = buffer

    def momentum_buffer(self, name: str) -> Tensor | None:
        return self._buffers.get(name)


def gradient(rank: int, step: int, layout: Layout = MODEL) -> Tensor:
    """Flat float32 (layout.segments.end,): heavy-tailed, of very different scales by tensor."""
    flat = torch.zeros(layout.segments.end, dtype=torch.float32, device="cpu")
    for entry in layout:
        seed = hash((rank, step, len(entry.name), entry.numel)) % (1 << 31)
        rng = torch.Generator().manual_seed(seed)
        values = torch.randn(entry.numel, generator=rng, dtype=torch.float32, device="cpu")
        flat[entry.offset : entry.offset + entry.numel] = values**3 * (1 + entry.numel % 7)
    return flat


def cut(layout: Layout, *sizes: int) -> list[Layout]:
    """The layout's tensors in buckets of so many tensors, each packed from offset 0, last tensor first."""
    entries, buckets = list(reversed(layout.entries)), []
    for size in sizes:
        buckets.append(Layout.of((entry.name, entry.shape) for entry in entries[:size]))
        entries = entries[size:]
    assert not entries, "the sizes cover the layout"
    return buckets


def take(flat: Tensor, layout: Layout, bucket: Layout) -> Tensor:
    """The bucket's tensors out of a flat gradient of the whole layout."""
    out = torch.empty(bucket.numel, dtype=torch.float32, device="cpu")
    for entry in bucket:
        source = layout[entry.name]
        out[entry.offset : entry.offset + entry.numel] = flat[source.offset : source.offset + source.numel]
    return out


def put(mean: Tensor, bucket: Layout, flat: Tensor, layout: Layout) -> None:
    """The bucket's mean back into a flat gradient of the whole layout."""
    for entry in bucket:
        target = layout[entry.name]
        flat[target.offset : target.offset + entry.numel] = mean[entry.offset : entry.offset + entry.numel]


def exchange_on(
    comm: Loopback, spec: Any, settings: Settings | None = None, layout: Layout = MODEL
) -> Attached:
    """Attach the method of a spec on one rank; without settings, to an optimiser without momentum."""
    return Attached(lift(spec), layout, Metered(comm), settings or Settings(momentum=0.0))


def one_step(exchange: Attached, flat: Tensor, buckets: list[Layout]) -> tuple[Tensor, bool]:
    """Exchange one gradient bucket by bucket. Return its flat mean, and whether it is valid."""
    mean = torch.zeros_like(flat)
    exchange.begin()
    for bucket in buckets:
        part = take(flat, exchange.layout, bucket)
        exchange.mean_(part, bucket)
        put(part, bucket, mean, exchange.layout)
    exchange.end()
    return mean, exchange.skip_reason is None


def everywhere(size: int, play: Callable[[Loopback], Any]) -> list[Any]:
    """Results of all ranks, in rank order."""
    return Loopback.run(size, play)


def bucket_of(entries: tuple[Entry, ...]) -> Layout:
    """A bucket of these tensors."""
    return Layout.of((entry.name, entry.shape) for entry in entries)
