"""Does SketchML's min-max sketch pay? Bits and error of the values of kept entries, with it and without.

    python -m benchmarks.sketch    some seconds; writes nothing

Of the stored gradient's weights (benchmarks/gradient.py), and of normal numbers in a tensor of a million, the
largest entries at some densities. Bits are those of a value: of the whole wire of values, and of it without
the codebook, which takes 32 bits a bin and counts for little where tensors are large. Error is |C(x) - x|^2 /
|x|^2 of the kept entries. The last column is what `quantile` takes, its codebook too, for as small an error:
between its powers of two by the logarithm of the error; "< 1" where two bins, one bit, already err less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gradient import stored
from laconic.codecs.minmax_sketch import MinmaxSketch
from laconic.codecs.quantile import Quantile
from laconic.codecs.selectors.topk import TopK
from laconic.core.codec import Codec
from laconic.core.layout import Segments

DENSITIES = (0.01, 0.05, 0.3)
SKETCHES = (
    MinmaxSketch(),
    MinmaxSketch(value="least"),
    MinmaxSketch(groups=64),
    MinmaxSketch(rows=1),
    MinmaxSketch(bins=64, groups=16),
    MinmaxSketch(bins=32, groups=8, rows=1, share=0.5),
)


@dataclass(frozen=True)
class Cost:
    """Bits of a value, those without the codebook, and the squared error over that of sending nothing."""

    bits: float
    bare: float
    error: float


def cost(codec: Codec, bins: int, parts: list[Tensor]) -> Cost:
    """Of one message of all tensors' kept values; of no more values than bins each is its own bin."""
    x, segments = torch.cat(parts), Segments.consecutive([part.numel() for part in parts])
    wire = codec.encode_segments(x, segments, range(len(parts)))
    off = codec.decode_segments_add_(wire, segments, -x).double().square().sum()
    books = sum(4 * min(bins, part.numel()) for part in parts)
    n, total = x.numel(), wire.numel()
    return Cost(8 * total / n, 8 * (total - books) / n, float(off / x.double().square().sum()))


def at_equal_error(error: float, costs: list[Cost], bare: bool) -> str:
    """Bits of `quantile` at this error, from its costs by ascending bins."""
    bits = [each.bare if bare else each.bits for each in costs]
    if error >= costs[0].error:
        return f"< {bits[0]:.1f}"
    for (a, few), (b, many) in pairwise(zip(costs, bits, strict=True)):
        if error >= b.error > 0:
            part = math.log(a.error / error) / math.log(a.error / b.error)
            return f"{few + part * (many - few):.1f}"
    return f"> {bits[-1]:.1f}"


def kept(tensors: list[Tensor], density: float) -> list[Tensor]:
    """The largest entries of each tensor, in their order."""
    select = TopK(density)
    return [part[select.select(part).long()] for part in tensors]


def main() -> None:
    """Measure and show."""
    torch.set_num_threads(1)
    weights = [part.flatten() for part in stored().values() if part.dim() > 1]
    normal = [torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))]
    for name, tensors in (("stored gradient, weights", weights), ("a million normal numbers", normal)):
        for density in DENSITIES:
            parts = kept(tensors, density)
            plain = [(bins, cost(Quantile(bins), bins, parts)) for bins in (2, 4, 8, 16, 32, 64, 128, 256)]
            table = Table(title=f"{name}: {sum(map(len, parts)):,} kept at density {density}")
            for column in ("values", "bits", "without codebook", "error", "quantile, equal error", "without"):
                table.add_column(column)
            for bins, each in plain:
                table.add_row(repr(Quantile(bins)), *shown(each), "", "")
            for codec in SKETCHES:
                each = cost(codec, codec.bins, parts)
                costs = [other for _, other in plain]
                equal = (at_equal_error(each.error, costs, bare) for bare in (False, True))
                table.add_row(repr(codec), *shown(each), *equal)
            Console(width=130).print(table)


def shown(each: Cost) -> tuple[str, str, str]:
    return f"{each.bits:.2f}", f"{each.bare:.2f}", f"{each.error:.5f}"


if __name__ == "__main__":
    main()
