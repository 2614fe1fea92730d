"""SparseLoCo and its parts: chunks, centroids, the recursion, and its bytes."""

from __future__ import annotations

import math

import torch
from tests.unit.shared import refuses
from tests.unit.strategy_world import N, gradient, start, trained
from torch import Tensor

from laconic.codecs.centroids import Centroids
from laconic.codecs.selectors.chunked_topk import ChunkedTopK
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.strategies.local_steps.sparseloco import SparseLoCo


def test_every_chunk_sends_its_share() -> None:
    """However large one chunk is beside another, against sorting."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * (1 + torch.arange(1000) // 64 * 100)
    found = ChunkedTopK(density=0.05, chunk=64).select(x)
    wanted = [
        begin + int(i)
        for begin in range(0, 1000, 64)
        for i in x[begin : begin + 64].abs().topk(math.ceil(0.05 * min(64, 1000 - begin) - 1e-9)).indices
    ]
    assert found.tolist() == sorted(wanted)


def test_a_value_becomes_the_mean_of_its_bin() -> None:
    """Two bits: what is beyond 1.5 standard deviations of the mean, and what is not, above and below it."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) + 0.3
    codec = Centroids()
    wire = codec.encode(x)
    back = codec.decode(wire, 5000)
    assert wire.numel() == 16 + 5000 // 4
    mean, deviation = x.double().mean(), x.double().std(correction=0)
    far, above = (x.double() - mean).abs() >= 1.5 * deviation, x.double() >= mean
    for inside in (far & above, far & ~above, ~far & above, ~far & ~above):
        torch.testing.assert_close(back[inside], x[inside].mean().expand(int(inside.sum())))


def test_centroids_lose_little_of_what_top_k_chooses() -> None:
    """Of a heavy tail: measured 6 % of the squared norm, where one magnitude (`signmean`) loses 13 %."""
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)) ** 3
    chosen = x[ChunkedTopK(density=1 / 64).select(x).long()]

    def lost(codec: Codec) -> float:
        back = codec.decode(codec.encode(chosen), chosen.numel())
        return float((back - chosen).square().sum() / chosen.square().sum())

    assert lost(Centroids()) < 0.1 < lost(parse("signmean()"))


def twin(size: int, steps: int, every: int, decay: float, density: float) -> Tensor:
    """The recursion with one chunk and exact values: at most four of them are sent."""
    x, ranks, e = start(), [start() for _ in range(size)], [torch.zeros(12) for _ in range(size)]
    for step in range(steps):
        ranks = [each - 0.1 * gradient(each, r, step) for r, each in enumerate(ranks)]
        if step % every == every - 1:
            mean = sum((x - each for each in ranks), torch.zeros(N)) / size
            mean[:12] = 0
            for r, each in enumerate(ranks):
                e[r] = decay * e[r] + (x - each)[:12]
                where = e[r].abs().topk(math.ceil(density * 12)).indices
                mean[where] += e[r][where] / size
                e[r][where] = 0
            x = x - mean
            ranks = [x.clone() for _ in ranks]
    return x


def test_sparseloco_is_the_papers_recursion() -> None:
    found = trained("sparseloco(every=3, density=0.25)", 3, 12)
    torch.testing.assert_close(found[0], twin(3, 12, 3, 0.95, 0.25), rtol=1e-5, atol=1e-5)


def test_its_bytes_are_what_its_docs_say() -> None:
    """Of four million parameters 1/64 in 9.5 bits each: 215 times less."""
    layout = Layout.of((f"w{i}", (1024, 1024)) for i in range(4))
    (route, _) = SparseLoCo().outer.compressor.routes
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    wire = route.reducer.feedback_codec().encode_segments(x, layout.segments, [0] * 4)
    assert 9.4 < 8 * wire.numel() / (layout.numel / 64) < 9.8
    assert 4 * layout.numel / wire.numel() > 205


def test_wrong_settings_are_refused() -> None:
    for spec, words in (
        ("sparseloco(every=0)", "every must be a whole number of 1 or more"),
        ("sparseloco(density=2)", r"density must be a number in \(0, 1\]"),
        ("sparseloco(chunk=0)", "chunked_topk: chunk must be a whole number of 1 or more"),
        ("sparseloco(bits=9)", r"centroids: bits must be a whole number in 1\.\.8"),
        ("sparseloco(decay=0)", r"decay must be a number in \(0, 1\]"),
        ("centroids(range=-1)", "centroids: range must be a finite number above 0"),
    ):
        refuses(SpecError, words, parse, spec)
