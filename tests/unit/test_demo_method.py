"""DeMo and its transform: against the definitions, and what it is good at."""

from __future__ import annotations

import math
import re

import pytest
import torch
from tests.laws.worlds import MODEL, everywhere, exchange_on, gradient, one_step
from tests.unit.shared import for_each, refuses
from torch import Tensor

from laconic.codecs.dct import DCT, by_tiles, cosines
from laconic.codecs.dense import Dense
from laconic.codecs.selectors.chunked_topk import ChunkedTopK
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.method import Method


def there(x: Tensor, tile: int) -> Tensor:
    return by_tiles(x, tile, lambda d, tiles: d @ tiles @ d.T)


def back(y: Tensor, tile: int) -> Tensor:
    return by_tiles(y, tile, lambda d, tiles: d.T @ tiles @ d)


def test_the_transform_is_the_cosine_transform() -> None:
    """Against its definition, a sum an entry, on one tile of 4 by 4."""
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    across = [[math.cos(math.pi / 8 * k * (2 * i + 1)) for i in range(4)] for k in range(4)]
    values = x.view(4, 4).tolist()
    sums = [
        [sum(values[i][j] * a[i] * b[j] / 2 for i in range(4) for j in range(4)) for b in across]
        for a in across
    ]
    wanted = torch.tensor(sums)
    wanted[0] /= math.sqrt(2)
    wanted[:, 0] /= math.sqrt(2)
    torch.testing.assert_close(there(x, 4), wanted.flatten())


@for_each("n", [0, 1, 3, 4, 100, 4096, 5001])
def test_it_keeps_the_norm_and_goes_back(n: int) -> None:
    """Whatever does not fill a tile is in smaller ones. To float32."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    y = there(x, 64)
    assert y.norm().item() == pytest.approx(x.norm().item(), rel=1e-6)
    torch.testing.assert_close(back(y, 64), x, rtol=1e-6, atol=1e-6)
    assert n < 16 or not torch.allclose(x, y)
    for t in (2, 64):
        torch.testing.assert_close(cosines(t) @ cosines(t).T, torch.eye(t).double())


def lost(codec: Codec, x: Tensor) -> float:
    return float((codec.decode(codec.encode(x), x.numel()) - x).square().sum() / x.square().sum())


def test_what_is_smooth_takes_few_coefficients() -> None:
    """Of smooth tiles under noise, 32 of 4,096 coefficients; as many elements hold next to nothing."""
    line = torch.linspace(0, 3, 64)
    smooth = torch.outer(torch.sin(line), torch.cos(2 * line)).flatten()
    x = smooth.repeat(4) + 0.01 * torch.randn(4 * 4096, generator=torch.Generator().manual_seed(0))
    chosen = parse("sparse(chunked_topk(density=0.0078125), indices=golomb())")
    assert lost(DCT(chosen), x) < 0.01
    assert lost(chosen, x) > 0.9
    assert DCT(chosen).encode(x).numel() <= DCT(chosen).nbytes(x.numel())


@for_each("decay", [0.999, 0.9])
def test_demo_is_the_papers_recursion(decay: float) -> None:
    """With exact values, tensor by tensor. To float32."""
    size, steps, density, tile = 2, 6, 0.05, 8

    def play(comm):  # type: ignore[no-untyped-def]
        spec = f"demo(density={density}, tile={tile}, decay={decay}, values=dense())"
        exchange = exchange_on(comm, spec)
        return [one_step(exchange, gradient(comm.rank, t), [MODEL])[0] for t in range(steps)]

    found = everywhere(size, play)[0]
    for entry in (entry for entry in MODEL if len(entry.shape) > 1):
        where = slice(entry.offset, entry.offset + entry.numel)
        momentum = [torch.zeros(entry.numel) for _ in range(size)]
        for t in range(steps):
            mean = torch.zeros(entry.numel)
            for r in range(size):
                momentum[r] = decay * momentum[r] + gradient(r, t)[where]
                y = there(momentum[r], tile)
                kept = torch.zeros_like(y)
                chosen = ChunkedTopK(density, chunk=tile * tile).select(y).long()
                kept[chosen] = y[chosen]
                momentum[r] = momentum[r] - back(kept, tile)
                mean += back(kept, tile) / size
            torch.testing.assert_close(found[t][where], mean, rtol=1e-3, atol=1e-3)


def test_a_coefficient_takes_1_3_bytes() -> None:
    layout = Layout.of([("w", (1024, 1024))])
    (route, _) = parse("demo()").routes
    wire = route.reducer.feedback_codec().encode(torch.randn(layout.numel))
    assert 10.0 < 8 * wire.numel() / (layout.numel / 128) < 10.7


def test_sums_that_are_too_large_are_cut_off() -> None:
    x = torch.full((4096,), 3e38)
    assert bool(there(x, 64).isfinite().all())
    assert bool(DCT(Dense()).decode(DCT(Dense()).encode(x), 4096).isfinite().all())


@for_each(
    "spec, words",
    [
        ("demo(tile=48)", "demo: tile must be"),
        ("demo(density=0)", "density must be a number in (0, 1]"),
        ("demo(decay=1.5)", "decay must be a number in (0, 1]"),
        ("demo(values=topk(density=0.1))", "demo: values must be a codec, such as centroids()"),
        ("dct(topk(density=0.1))", "dct: codec must be a codec, such as sparse(topk(density=0.01))"),
    ],
)
def test_wrong_settings_are_refused(spec: str, words: str) -> None:
    refuses(SpecError, re.escape(words), parse, spec)


@for_each("n", [10**6, 1500 * 1500, 4096 * 4096, 10**9])
def test_a_large_matrix_is_taken_too(n: int) -> None:
    """The transform rounds, by which what is just below 1 must not become 1: feedback would be refused."""
    method = parse("demo()")
    assert isinstance(method, Method)
    codec = method.routes[0].reducer.codec
    assert codec is not None and 0.9 < codec.omega(n) < 1
