"""Entropy coding: bits compared with the entropy of the symbols, speed of the codings, and bytes of STC.

    python -m benchmarks.entropy             writes benchmarks/entropy/results.json
    python -m benchmarks.entropy --quick     a sixteenth of the elements; writes nothing

Three tables, each for normal numbers in the tensors of ResNet-50 and for the stored gradient of a small
network (benchmarks/gradient.py), of their weights:

    positions    of the largest entries of each tensor: bits an index in every index coding, beside the
                 entropy of "chosen or not", n H(k / n) a tensor; million indices a second, one thread
    levels       of QSGD: bits an element in every coding, beside the entropy of the levels as they are
                 drawn, tensor by tensor; counts and lengths are in, the scales are left out of both
    stc          float32 bytes over those of a message of all tensors, vectors too; and over those that
                 `Metered` counts on `Loopback`, for the weights, and with the vectors as they are
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gradient
from benchmarks.common.machine import machine
from benchmarks.common.resnet50 import SIZES
from laconic import kernels
from laconic.codecs.qsgd import QSGD
from laconic.codecs.qsgd.level_codings import CODINGS
from laconic.codecs.selectors.topk import TopK
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout, Segments
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.exchange.method import lift

RESULTS = Path(__file__).with_name("results.json")
DENSITIES = (0.04, 0.01, 0.0025, 0.001)
INDICES = ("raw32()", "delta()", "golomb()", "fine_delta()")
QUANTISERS = (
    QSGD(levels=1),
    QSGD(levels=1, block=0),
    QSGD(levels=1, norm="l2"),
    QSGD(levels=1, block=0, norm="l2"),
    QSGD(levels=7),
    QSGD(levels=7, norm="l2"),
)
WEIGHT = 4096  # elements of the smallest tensor of ResNet-50 that is no vector
Source = tuple[str, Tensor, Layout]


def main() -> None:
    """Measure, print the tables, write the JSON."""
    options = argparse.ArgumentParser(prog="benchmarks.entropy")
    options.add_argument("--quick", action="store_true", help="fewer elements; writes nothing")
    quick = options.parse_args().quick
    torch.set_num_threads(1)
    made = {
        "positions": [row for source in sources(quick) for row in positions(*source)],
        "levels": [row for source in sources(quick) for row in levels(*source)],
        "stc": [row for source in sources(quick) for row in stc(*source)],
    }
    for name, rows in made.items():
        print(
            f"{name}\n  "
            + "\n  ".join("  ".join(f"{key} {value}" for key, value in row.items()) for row in rows)
        )
    if not quick:
        RESULTS.write_text(json.dumps({"machine": machine(), **made}, indent=1) + "\n")


def sources(quick: bool) -> Iterator[Source]:
    """Name, flat float32 values, and layout, vectors included."""
    sizes = [size // 16 if quick and size >= 16 * WEIGHT else size for size in SIZES]
    shapes = [(64, size // 64) if size >= WEIGHT else (size,) for size in sizes]
    layout = Layout.of((f"{i}", shape) for i, shape in enumerate(shapes))
    yield "normal", torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)), layout
    parts = gradient.stored()
    layout = Layout.of((name, tuple(part.shape)) for name, part in parts.items())
    yield "gradient", torch.cat([part.flatten() for part in parts.values()]), layout


def weights(x: Tensor, layout: Layout) -> tuple[Tensor, Segments]:
    """The tensors of two dimensions and more, one after the other."""
    views = layout.where(lambda entry: len(entry.shape) > 1).segments.views(x)
    return torch.cat(views), Segments.consecutive(view.numel() for view in views)


def positions(source: str, x: Tensor, layout: Layout) -> Iterator[dict[str, Any]]:
    """A row for each density and index coding."""
    x, segments = weights(x, layout)
    for density in DENSITIES:
        indices, counts = TopK(density).select_segments(x, segments, range(len(segments)))
        chosen = zip(counts.tolist(), segments.sizes, strict=True)
        entropy = sum(held(torch.tensor([k, n - k])) for k, n in chosen) / indices.numel()
        for spec in INDICES:
            coding = parse(spec)
            wire = coding.encode(indices, counts, segments)
            bits = 8 * wire.numel() / indices.numel()
            encode_s = seconds(lambda c=coding, i=indices, k=counts: c.encode(i, k, segments))
            decode_s = seconds(lambda c=coding, w=wire, k=counts: c.decode(w, k, segments))
            yield {
                "source": source,
                "density": density,
                "coding": spec,
                "bits": round(bits, 3),
                "entropy": round(entropy, 3),
                "ratio": round(bits / entropy, 4),
                "encode_million_a_second": round(indices.numel() / encode_s / 1e6),
                "decode_million_a_second": round(indices.numel() / decode_s / 1e6),
            }


def levels(source: str, x: Tensor, layout: Layout) -> Iterator[dict[str, Any]]:
    """A row for each quantiser and coding of its levels."""
    x, segments = weights(x, layout)
    for codec in QUANTISERS:
        keys, measure = range(len(segments)), codec.measures(x, segments)
        scales, drawn = kernels.quantise_levels(x, segments, keys, codec.form, measure)
        parts = segments.views(drawn + codec.levels)
        entropy = sum(held(torch.bincount(part)) for part in parts) / drawn.numel()
        used = float((drawn != 0).float().mean())
        fixed = codec.message_nbytes(segments) - 4 * scales.numel()
        lengths = {"fixed": fixed} | {
            name: coding.encode(drawn, segments, codec.levels).numel() for name, coding in CODINGS.items()
        }
        for name, nbytes in lengths.items():
            bits = 8 * nbytes / drawn.numel()
            yield {
                "source": source,
                "codec": repr(codec),
                "coding": name,
                "not_zero": round(used, 5),
                "bits": round(bits, 4),
                "entropy": round(entropy, 4),
                "ratio": round(bits / entropy, 4),
                "scale_bits": round(32 * scales.numel() / drawn.numel(), 4),
            }


def stc(source: str, x: Tensor, layout: Layout) -> Iterator[dict[str, Any]]:
    """A row for each density: the codec's message of all tensors; what the method hands to collectives."""
    rank_x = [x, x.flip(0)]
    for density in (0.01, 0.0025):
        method = lift(f"stc(density={density})")
        route, codec = method.routes[0], method.routes[0].reducer.feedback_codec()
        assert codec is not None
        message = codec.encode_segments(x, layout.segments, range(len(layout))).numel()
        part = method.assign(layout)[0]

        def counted(comm: Loopback, route: Any = route, part: Layout = part) -> int:
            metered = Metered(comm)
            mine = rank_x[comm.rank]
            out = torch.zeros_like(mine)
            route.reducer.bind(part, metered).reduce(mine, part, Turn(0, comm.rank), out)
            return metered.snapshot().payload_sent

        sent = max(Loopback.run(2, counted))
        vectors = 4 * (layout.numel - part.numel)
        yield {
            "source": source,
            "density": density,
            "message_of_all_tensors": round(4 * layout.numel / message, 1),
            "metered_of_weights": round(4 * part.numel / sent, 1),
            "metered_with_dense_vectors": round(4 * layout.numel / (sent + vectors), 1),
        }


def held(counts: Tensor) -> float:
    """Bits that symbols hold which occur so often: sum of c log2(n / c)."""
    seen = counts[counts > 0].double()
    return float((seen * (seen.sum() / seen).log2()).sum())


def seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """The least processor time of one call."""
    least = math.inf
    for _ in range(repeats):
        began = time.thread_time()
        work()
        least = min(least, time.thread_time() - began)
    return max(least, 1e-9)


if __name__ == "__main__":
    main()
