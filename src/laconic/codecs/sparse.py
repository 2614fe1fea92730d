"""Sparse: chosen entries only, their values by any codec, their positions by an index coding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.dense import Dense
from laconic.codecs.indices.raw32 import Raw32
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.framing import counts_bytes, keys_bytes, read_counts, read_keys, read_positions
from laconic.core.layout import Layout, Segments
from laconic.core.selector import IndexCoding, Selector
from laconic.core.turn import Turn

VALUES = 0x9E3779B97F4A7C15  # apart from the selector's draws, those of the values have keys of their own
DENSE, RAW32 = Dense(), Raw32()


@dataclass(frozen=True, repr=False)
class Sparse(Codec):
    """Lifts any codec of values to a sparse one.

    Message of s tensors, of which k_i entries each are chosen, K together:

        counts k_i   uint32 (s,)
        m            uint32
        positions    uint8 (m,)    `indices` of all K at once
        values       `values` of K elements as one message of s tensors, in the order of the positions

    and, for a selector that can be replayed (`randomk`), since counts and positions follow from the keys:

        keys         uint64 (s,)
        values       as above

    There ranks share the keys of the positions, so that all choose the same entries, but not those of the
    values: independent rounding errors average out.

    A wire is a message of one tensor: 8 + m + 4 k bytes with dense values. Nothing is chosen across tensors.
    Error: with d the selector's omega and w that of the values, at most d of |x|^2 is left out, and w of the
    rest is lost, so omega = d + w (1 - d) for w <= 1, else max(w, d).

    >>> from laconic.codecs.selectors.topk import TopK
    >>> codec = Sparse(TopK(density=0.5))
    >>> wire = codec.encode(torch.tensor([0.1, -3.0, 0.2, 2.0]))
    >>> wire.numel(), codec.decode(wire, 4).tolist()
    (24, [0.0, -3.0, 0.0, 2.0])
    """

    select: Selector
    values: Codec = DENSE
    indices: IndexCoding = RAW32

    fixed_size: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = (
        "sparse(topk(density=0.05))",
        "sparse(topk(density=0.01), indices=golomb())",
        "sparse(topk(density=1.0))",
        "sparse(topk(density=0.1), values=cast(dtype='fp16'), indices=delta())",
        "sparse(sampled_topk(density=0.02), indices=golomb())",
        "sparse(threshold(value=0.5), indices=golomb())",
        "sparse(randomk(density=0.05))",
        "sparse(randomk(density=0.1), values=cast(dtype='bf16'))",
    )

    def __post_init__(self) -> None:
        for role, given, wanted, example in (
            ("select", self.select, Selector, "topk(density=0.01)"),
            ("values", self.values, Codec, "cast('fp16')"),
            ("indices", self.indices, IndexCoding, "golomb()"),
        ):
            if not isinstance(given, wanted):
                raise SpecError(f"sparse: {role} must be a {wanted.__name__}, as {example}, got {given!r}")

    def at(self, step: int) -> Codec:
        select, values = self.select.at(step), self.values.at(step)
        if select is self.select and values is self.values:
            return self
        return replace(self, select=select, values=values)

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return self._message(x, segments, keys, keys)

    def encode_layout(self, x: Tensor, layout: Layout, turn: Turn) -> Tensor:
        own = [turn.own(name) for name in layout.names]
        common = [turn.common(name) for name in layout.names]
        return self._message(x, layout.segments, common if self.select.replayable else own, own)

    def _message(self, x: Tensor, segments: Segments, keys: Sequence[int], drawn: Sequence[int]) -> Tensor:
        """Positions by `keys`, which may travel; values by `drawn`, which decoding does without."""
        indices, counts = self.select.select_segments(x, segments, keys)
        chosen = kernels.gather(x, segments, indices, counts)
        units = Segments.consecutive(counts.tolist())
        values = self.values.encode_segments(chosen, units, [key ^ VALUES for key in drawn])
        if self.select.replayable:
            return torch.cat([keys_bytes(keys).to(x.device), values])
        positions = self.indices.encode(indices, counts, segments)
        head = torch.cat([counts, torch.tensor([positions.numel()])])
        return torch.cat([counts_bytes(head).to(x.device), positions, values])

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        indices, counts, rest = self._positions(wire, segments)
        units = Segments.consecutive(counts.tolist())
        values = torch.zeros(indices.numel(), dtype=torch.float32, device=out.device)
        self.values.decode_segments_add_(rest, units, values)
        return kernels.scatter_add_(out, segments, indices, counts, values, alpha)

    def clear_segments_(self, wire: Tensor, segments: Segments, memory: Tensor) -> Tensor:
        indices, counts, _ = self._positions(wire, segments)
        return kernels.scatter_zero_(memory, segments, indices, counts)

    def _positions(self, wire: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
        """Indices int32 (K,), counts int64 (s,) and the bytes of the values. All of the wire is untrusted."""
        if self.select.replayable:
            keys, rest = read_keys(wire, segments)
            indices, counts = self.select.select_segments(wire, segments, keys)
            return indices, counts, rest
        counts, rest = read_counts(wire, segments)
        positions, rest = read_positions(rest)
        return self.indices.decode(positions, counts, segments), counts, rest

    def nbytes(self, n: int) -> int:
        return self.message_nbytes(Segments.whole(n))

    def message_nbytes(self, segments: Segments) -> int:
        most = [self.select.max_count(size) for size in segments.sizes]
        values = self.values.message_nbytes(Segments.consecutive(most))
        if self.select.replayable:
            return 8 * len(segments) + values
        positions = sum(self.indices.nbytes(k, n) for k, n in zip(most, segments.sizes, strict=True))
        return 4 * len(segments) + 4 + positions + values

    def omega(self, n: int) -> float:
        left, lost = self.select.omega(n), self.values.omega(self.select.max_count(n))
        return left + lost * (1 - left) if lost <= 1 else max(lost, left)

    @property
    def normal(self) -> tuple[float, float]:
        return self.values.normal

    def absolute_error(self, n: int) -> float | None:
        left, lost = self.select.absolute_error(n), self.values.absolute_error(self.select.max_count(n))
        return None if left is None or lost is None else left + lost
