"""Min-max sketch: bins of equal count, whose indices are sent in a hash table smaller than the tensor.

The grouped MinMaxSketch of SketchML (Jiang et al. 2018, SIGMOD), verified against its public code
(ccchengff/SketchML). Differences: bins come from all values, not a sketch of them; a group has one sign, and
each element sends its group, not each group its positions; cells have a fixed number of bits, not a Huffman
code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from laconic import kernels
from laconic.core import arguments
from laconic.core.errors import NonFiniteError, SpecError, WireError
from laconic.core.layout import Segments
from laconic.core.spec import Status
from laconic.core.tensor_codec import TensorCodec
from laconic.kernels.codebook.shapes import bits_for, quantile_shape

MOST = 1 << 16
ROWS = 16
Value = Literal["mean", "least"]


@dataclass(frozen=True, repr=False)
class MinmaxSketch(TensorCodec):
    """The n sorted values of a tensor are cut into `groups` groups as by `quantile(groups)`, each of w bins.

    w = bins / groups. An element sends its group; its bin, counted from the one closest to zero, goes into
    the group's table of `rows` by c = ceil(share * n / groups) cells, where the least bin of a cell stays.
    The decoder takes the largest of an element's cells: never a bin further from zero than its own. `value`
    of a bin: the "mean" of the elements decoded to it, or "least", their smallest magnitude.

    Wire: the bins' values float32 (bins,), group by group from zero on, 0 if unused; groups of elements in
    ceil(log2 groups) bits; the tables in ceil(log2 w) bits per cell: about 4 bins + n (log2 groups + rows *
    share * log2 w) / 8 bytes, rows * share < 1. Up to `bins` elements are sent exactly, as by
    `quantile(bins)`; larger wires are padded with zeros to the size of `bins` elements.

    Error: with "mean" at most 1 - 1/m of |x|^2, m = ceil(2 n / groups). With "least" at most |x|^2, so error
    feedback refuses it. `quantile` has the same error with fewer bits (benchmarks/sketch.py).

    >>> x = torch.tensor([4.0, -1.0, 2.0, -2.0, 8.0, -4.0, 1.0, -8.0, 6.0])
    >>> codec = MinmaxSketch(bins=8, groups=2, value="least")
    >>> codec.decode(codec.encode(x), 9).tolist()
    [1.0, -1.0, 1.0, -1.0, 8.0, -4.0, 1.0, -8.0, 1.0]
    """

    bins: int = 256
    groups: int = 16
    rows: int = 2
    share: float = 0.3
    value: Value = "mean"

    unbiased: ClassVar[bool] = False
    paper: ClassVar[str] = "Jiang et al. 2018, SIGMOD"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "ccchengff/SketchML"
    examples: ClassVar[tuple[str, ...]] = (
        "minmax_sketch()",
        "minmax_sketch(bins=24, groups=6, rows=1, share=0.5)",
        "minmax_sketch(bins=16, groups=4, value='least')",
        "sparse(topk(density=0.05), values=minmax_sketch(bins=32, groups=8), indices=fine_delta())",
    )

    def __post_init__(self) -> None:
        arguments.whole("minmax_sketch: bins", self.bins, 4, MOST)
        arguments.whole("minmax_sketch: groups", self.groups, 2, self.bins // 2, "each has two bins or more")
        if self.bins % self.groups:
            raise SpecError(
                f"minmax_sketch: groups must divide bins, got {self.groups} of {self.bins}: powers of two do"
            )
        arguments.whole("minmax_sketch: rows", self.rows, 1, ROWS)
        hint = "tables as large as that hold no less than the bins themselves: use quantile()"
        arguments.number("minmax_sketch: share", self.share, above=0, below=1 / self.rows, hint=hint)
        arguments.choice("minmax_sketch: value", self.value, get_args(Value))

    def shape(self, n: int) -> kernels.SketchShape:
        columns = math.ceil(self.share * n / self.groups)
        return kernels.SketchShape(self.groups, self.rows, columns, self.bins // self.groups)

    def encode_tensor(self, x: Tensor, key: int) -> Tensor:
        n = x.numel()
        if n <= self.bins:
            return kernels.quantile_encode(x, Segments.whole(n), self.bins)
        if not bool(x.isfinite().all()):
            raise NonFiniteError("a codebook cannot hold NaN or Inf: skip this step, it has no gradient")
        shape = self.shape(n)
        groups, bins = places(x, self.groups, shape.width)
        table = kernels.sketch_insert(bins, groups, shape)
        seen = groups * shape.width + kernels.sketch_query(table, groups, shape)
        packed = [
            kernels.pack_bits(codes.to(torch.int32), bits)
            for codes, bits in ((groups, bits_for(self.groups)), (table, bits_for(shape.width)))
        ]
        wire = torch.cat([self._book(x, seen).view(torch.uint8), *packed])
        return functional.pad(wire, (0, self.nbytes(n) - wire.numel()))

    def _book(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return the values of bins; elements of x are decoded to bins `seen`."""
        if self.value == "least":
            sizes = torch.full((self.bins,), math.inf, device=x.device, dtype=torch.float32)
            sizes.scatter_reduce_(0, seen, x.abs(), "amin")
            below = torch.zeros(self.bins, dtype=torch.bool, device=x.device).index_fill_(
                0, seen[x < 0], True
            )
            return torch.where(sizes.isinf(), 0.0, torch.where(below, -sizes, sizes))
        sums = torch.zeros(self.bins, dtype=torch.float64, device=x.device).index_add_(0, seen, x.double())
        return (sums / torch.bincount(seen, minlength=self.bins).clamp(min=1)).float()

    def decode_tensor(self, wire: Tensor, n: int) -> Tensor:
        if n <= self.bins:
            out = torch.zeros(n, device=wire.device, dtype=torch.float32)
            return kernels.quantile_add_(wire, Segments.whole(n), out, self.bins)
        shape, bits = self.shape(n), bits_for(self.groups)
        lengths = self._lengths(n)
        parts = torch.split(wire[: sum(lengths)], lengths)
        book = parts[0].clone().view(torch.float32)
        groups = kernels.unpack_bits(parts[1].clone(), bits, n).to(torch.int64)
        table = kernels.unpack_bits(parts[2].clone(), bits_for(shape.width), shape.cells).to(torch.int64)
        if bool((groups >= self.groups).any() | (table >= shape.width).any()):
            raise WireError(f"{self!r}: a group or a bin is not in the codebook")
        return book[groups * shape.width + kernels.sketch_query(table, groups, shape)]

    def nbytes(self, n: int) -> int:
        exact = kernels.codebook_nbytes(quantile_shape(min(n, self.bins), self.bins), min(n, self.bins))
        return exact if n <= self.bins else max(exact, sum(self._lengths(n)))

    def _lengths(self, n: int) -> list[int]:
        shape = self.shape(n)
        table = kernels.packed_nbytes(shape.cells, bits_for(shape.width))
        return [4 * self.bins, kernels.packed_nbytes(n, bits_for(self.groups)), table]

    def omega(self, n: int) -> float:
        if n <= self.bins:
            return 0.0
        return 1.0 if self.value == "least" else 1 - 1 / -(-2 * n // self.groups)


def places(x: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor]:
    """Return each element's group, ascending in x, and its bin there, 0 closest to zero.

    Negative elements and the others get groups by their share, at least one if present.
    """
    n, negative = x.numel(), int((x < 0).sum())
    share = (2 * groups * negative + n) // (2 * n)
    if 0 < negative < n:
        share = min(max(share, 1), groups - 1)
    ranks = torch.arange(n, device=x.device, dtype=torch.int64)
    group, bins = torch.empty_like(ranks), torch.empty_like(ranks)
    for part, first, count, down in (
        (slice(0, negative), 0, share, True),
        (slice(negative, n), share, groups - share, False),
    ):
        rank = ranks[part] - part.start
        total = rank.numel()
        own = rank * count // max(total, 1)
        begin, end = (-(-(own + more) * total // max(count, 1)) for more in (0, 1))
        group[part] = own + first
        bins[part] = (end - 1 - rank if down else rank - begin) * width // (end - begin)
    order = torch.argsort(x, stable=True)
    return torch.empty_like(group).index_copy_(0, order, group), torch.empty_like(bins).index_copy_(
        0, order, bins
    )
