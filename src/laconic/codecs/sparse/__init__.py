"""Sparse: chosen entries only, their values by any codec, their positions by an index coding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic import kernels
from laconic.codecs.dense import Dense
from laconic.codecs.indices.golomb import Golomb
from laconic.codecs.indices.raw32 import Raw32
from laconic.codecs.selectors.density_schedule import has_density
from laconic.core import deferred, framing
from laconic.core.codec import Carried, Codec
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout, Segments
from laconic.core.message_runs import add_runs_
from laconic.core.selector import IndexCoding, Selector
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.kernels import dispatch

VALUES = 0x9E3779B97F4A7C15  # separates keys of values from the selector's
DENSE, RAW32 = Dense(), Raw32()
DAMAGED = (  # by flag
    "the positions are not what the counts announce: bits are missing or left over, or lead out of a tensor",
    "a value is NaN or Inf; only finite numbers are sent",
)


@dataclass(frozen=True, repr=False)
class Sparse(Codec):
    """Sparse form of any codec of values.

    Message of s tensors with K chosen entries, k_i of each tensor:

        counts k_i   uint32 (s,)
        m            uint32
        positions    uint8 (m,)    `indices` of all K at once
        values       `values` of K elements as one message of s tensors, in the order of the positions

    For a replayable selector (`randomk`), counts and positions follow from the keys:

        keys         uint64 (s,)
        values       as above

    All ranks then share the keys of the positions, but not of the values: rounding errors average out.

    A wire is a message of one tensor: 8 + m + 4 k bytes with dense values. `select` chooses in each tensor.
    Error: with d the selector's omega and w that of the values, omega = d + w (1 - d) for w <= 1, else max(w,
    d).

    >>> from laconic.codecs.selectors.topk import TopK
    >>> codec = Sparse(TopK(density=0.5))
    >>> wire = codec.encode(torch.tensor([0.1, -3.0, 0.2, 2.0]))
    >>> wire.numel(), codec.decode(wire, 4).tolist()
    (24, [0.0, -3.0, 0.0, 2.0])
    """

    status: ClassVar[Status] = "own"

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
        warm_at, final = self._after_warmup
        return final if step >= warm_at else self._during_warmup(step)

    @cached_property
    def _after_warmup(self) -> tuple[int, Sparse]:
        return (warm_at := self.warm_at), self._during_warmup(warm_at) if warm_at else self

    def _during_warmup(self, step: int) -> Sparse:
        return replace(self, select=self.select.at(step), values=self.values.at(step))

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return self._message(x, segments, keys, keys, decode=False)[0]

    def encode_layout(self, x: Tensor, layout: Layout, turn: Turn) -> Tensor:
        return self.encode_carried(x, layout, turn, decode=False)[0]

    def encode_carried(
        self, x: Tensor, layout: Layout, turn: Turn, *, decode: bool = True
    ) -> tuple[Tensor, Carried]:
        own = turn.own_keys(layout.names)
        common = [turn.common(name) for name in layout.names] if self.select.replayable else own
        return self._message(x, layout.segments, common, own, decode=decode)

    def _message(
        self, x: Tensor, segments: Segments, keys: Sequence[int], drawn: Sequence[int], *, decode: bool = True
    ) -> tuple[Tensor, Carried]:
        """Encode positions by `keys` and values by `drawn`, never sent."""
        if self._fused and (padded := self.select.padded(x, segments, keys)) is not None:
            whole = kernels.padded_encode(x, segments, *padded)
            if whole is not None:
                return whole[0], Carried(*whole[1:])
        indices, counts = self.select.select_segments(x, segments, keys)
        if self._fused and (made := kernels.sparse_encode(x, segments, indices, counts)) is not None:
            return made[0], Carried(indices, counts, *made[1:])
        native = dispatch.native(x, indices) is not None
        at = None if native else kernels.flat_positions(indices, counts, segments)
        chosen = kernels.gather(x, segments, indices, counts) if at is None else x.index_select(0, at)
        if isinstance(self.values, Dense):
            values = framing.as_bytes(chosen)
        else:
            units = Segments.consecutive(counts.tolist())
            values = self.values.encode_segments(chosen, units, [key ^ VALUES for key in drawn])
            if decode:
                chosen = self.values.decode_segments_add_(values, units, torch.zeros_like(chosen))
        carried = Carried(indices, counts, chosen, at)
        if self.select.replayable:
            return torch.cat([framing.sent_to(framing.keys_bytes(keys), x.device), values]), carried
        positions = self.indices.encode(indices, counts, segments)
        head = framing.counts_bytes(torch.from_numpy(np.append(counts.numpy(), positions.numel())))
        return torch.cat([framing.sent_to(head, x.device), positions, values]), carried

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        if not self._batched(wire, out):
            indices, counts, rest = self._entries(wire, segments)
            values, infinite = read_values(self.values, [rest], counts.numpy()[None], [indices.numel()])
            if bool(infinite):
                raise WireError(f"{self!r}: {DAMAGED[1]}")
            return kernels.scatter_add_(out, segments, indices, counts, values, alpha)
        return self._add_all_([wire], segments, out, alpha)

    def decode_messages_add_(
        self, messages: Sequence[tuple[Tensor, Segments]], out: Tensor, alpha: float = 1
    ) -> Tensor:
        if not messages:
            return out
        wires, segments = [wire for wire, _ in messages], messages[0][1]
        if any(each != segments for _, each in messages) or not self._batched(*wires, out):
            return super().decode_messages_add_(messages, out, alpha)
        return self._add_all_(wires, segments, out, alpha) if segments.numel else out

    @property
    def _fused(self) -> bool:
        known = isinstance(self.values, Dense) and isinstance(self.indices, Golomb)
        return known and not self.select.replayable

    def _batched(self, *tensors: Tensor) -> bool:
        return not self.select.replayable and dispatch.native(*tensors) is None

    def _add_all_(self, wires: Sequence[Tensor], segments: Segments, out: Tensor, alpha: float) -> Tensor:
        if self._fused and dispatch.gpu(out):
            framing.check_heads(wires, len(segments) + 1)
            flags = kernels.sparse_add_(wires, segments, out, alpha)
            if flags is not None:
                deferred.check(flags, lambda number: self._damage([number], wires, segments, out))
                return out
        return self._add_(wires, segments, out, alpha)

    def _damage(
        self, numbers: Sequence[int], wires: Sequence[Tensor], segments: Segments, out: Tensor
    ) -> WireError:
        for number in numbers:
            try:
                with deferred.deferred():
                    self._add_([wires[number]], segments, torch.zeros_like(out), 1)
            except WireError as error:
                error.message = number if len(wires) > 1 else None
                return error
        raise AssertionError("each message decodes alone, but not all of them together")

    def _add_(self, wires: Sequence[Tensor], segments: Segments, out: Tensor, alpha: float) -> Tensor:
        counts, coded, rest = framing.split_sparse(wires, segments)
        totals = counts.sum(axis=1).tolist()
        places, spare, wrong = self.indices.positions(coded, counts, segments)
        values, infinite = read_values(self.values, rest, counts, totals)
        flags = torch.stack([wrong, infinite]).to(torch.int32)

        def damaged(which: int) -> WireError:
            if len(wires) > 1:
                return self._damage(range(len(wires)), wires, segments, out)
            return WireError(f"{self!r}: {DAMAGED[which]}")

        deferred.check(flags, damaged)
        scaled = values * alpha
        if not out.is_cpu:  # adding -0.0 changes no number
            bad = flags.any()
            places, scaled = places.masked_fill(bad, 0), scaled.masked_fill_(bad, -0.0)
        sizes = [size for total in totals for size in (total, spare)][:-1]
        each = places.split_with_sizes(sizes)[::2]
        for at, value in zip(each, scaled.split_with_sizes(totals), strict=True):
            out.index_add_(0, at, value)
        return out

    def clear_segments_(self, wire: Tensor, segments: Segments, memory: Tensor) -> Tensor:
        indices, counts, _ = self._entries(wire, segments)
        return kernels.scatter_zero_(memory, segments, indices, counts)

    def _entries(self, wire: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices, counts and bytes of the values of an untrusted wire."""
        if self.select.replayable:
            keys, rest = framing.read_keys(wire, segments)
            indices, counts = self.select.select_segments(wire, segments, keys)
            return indices, counts, rest
        numbers, (coded,), (rest,) = framing.split_sparse([wire], segments)
        counts = torch.from_numpy(numbers[0])
        return self.indices.decode(coded, counts, segments), counts, rest

    def nbytes(self, n: int) -> int:
        return self.message_nbytes(Segments.whole(n))

    def message_nbytes(self, segments: Segments) -> int:
        most = [self.select.max_count(size) for size in segments.sizes]
        values = self.values.message_nbytes(Segments.consecutive(most))
        if self.select.replayable:
            return 8 * len(segments) + values
        positions = sum(self.indices.nbytes(k, n) for k, n in zip(most, segments.sizes, strict=True))
        return 4 * len(segments) + 4 + positions + values

    @property
    def scale_decides_size(self) -> bool:
        return not has_density(self.select)

    def omega(self, n: int) -> float:
        left, lost = self.select.omega(n), self.values.omega(self.select.max_count(n))
        return left + lost * (1 - left) if lost <= 1 else max(lost, left)

    @property
    def normal(self) -> tuple[float, float]:
        return self.values.normal

    def absolute_error(self, n: int) -> float | None:
        left, lost = self.select.absolute_error(n), self.values.absolute_error(self.select.max_count(n))
        return None if left is None or lost is None else left + lost


def read_values(
    codec: Codec, rest: Sequence[Tensor], counts: NDArray[np.int64], totals: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the values of all messages, and whether one is not finite."""
    device = rest[0].device
    if isinstance(codec, Dense):
        for number, (wire, total) in enumerate(zip(rest, totals, strict=True)):
            if wire.numel() != 4 * total:
                text = f"{codec!r}: {total} values fill {4 * total} bytes, got {wire.numel()}"
                raise framing.numbered(text, number, rest)
        values = framing.as_numbers(rest[0] if len(rest) == 1 else torch.cat(list(rest)), torch.float32)
        return values, (values - values).any()  # NaN counts as true
    values = torch.zeros(sum(totals), dtype=torch.float32, device=device)
    every, many = Segments.consecutive(counts.ravel().tolist()), counts.shape[1]
    starts = [every.starts[i * many : (i + 1) * many] for i in range(len(rest))]
    units = [Segments(at, tuple(row)) for at, row in zip(starts, counts.tolist(), strict=True)]
    messages = [*zip(rest, units, strict=True)]
    if codec.concatenates and len(rest) > 1 and not values.is_cpu:
        add_runs_(codec, messages, lambda wires, at: codec.decode_segments_add_(wires[0], at, values))
    elif len(rest) == 1:
        codec.decode_segments_add_(rest[0], units[0], values)
    else:
        codec.decode_messages_add_(messages, values)
    return values, torch.zeros((), dtype=torch.bool, device=device)
