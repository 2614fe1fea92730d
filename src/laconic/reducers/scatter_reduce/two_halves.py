"""Halves of a scatter-reduce, bound to a model's tensors and a group: `scatter`, then `gather`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, SentMessage, SentParts, add_messages_, encoded, encoded_parts
from laconic.comm.partition import Partition
from laconic.comm.skippable import all_to_all_or_skip, any_skips, gather_or_skip
from laconic.core.codec import Codec
from laconic.core.layout import Layout, PerLayout
from laconic.core.turn import Turn, mix
from laconic.reducers import BoundReducer
from laconic.reducers.scatter_reduce.cuts import cut, cuts
from laconic.reducers.scatter_reduce.hops import HOPS, travelling_mean
from laconic.reducers.scatter_reduce.mean_residual import MeanResidual
from laconic.reducers.sum import DenseShare

Pattern = Literal["direct", "ring", "tree"]
BOUNDED = 2.0**126  # a mean of x and of values up to here is finite
ANSWER = 0xA57E  # separates the keys of the second rounding


class TwoHalves(BoundReducer):
    """Bound reducer of `ScatterReduce` and `AdaptiveBits`; sharded training only calls `scatter`.

    `codec_of` returns the codec of some pieces at a step, equal on all ranks.
    """

    def __init__(
        self,
        layout: Layout,
        comm: Comm,
        pattern: Pattern,
        codec_of: Callable[[Layout, int], Codec],
        residual: MeanResidual | None = None,
    ) -> None:
        self._comm = comm
        self._pattern = pattern
        self._codec_of = codec_of
        self._residual = residual
        bounds = cuts(layout, comm.size)
        self._partition = PerLayout(lambda bucket: cut(bucket, bounds, comm.rank))

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        if self._residual is not None:
            self._residual.begin(turn.step)
        partition = self._partition(layout)
        mean, sent = self.scatter(x, partition, turn, out)
        if self.gather(mean, partition, turn, out, alpha):
            return sent
        self.put_back(layout)
        return None

    def scatter(
        self, x: Tensor | None, partition: Partition, turn: Turn, out: Tensor
    ) -> tuple[Tensor | None, Sent | None]:
        """Return the mean of this rank's pieces (`partition.home`), float32 (n,), and the sent share of x.

        Returns (None, None) if any rank's gradient is not finite. `out`, the destination, may be `x`.
        """
        if self._pattern != "direct":
            return self._travel(x, partition, turn, out)
        comm, parts, home = self._comm, partition.parts, partition.home
        codecs = self._codecs(partition, turn.step)
        wires, joined = None, None
        if x is not None and alike(codecs):
            wires, joined = encoded_parts(x, partition.to_others, codecs[0], turn)
        elif x is not None:
            pairs = zip(partition.to_others.layouts, codecs, strict=True)
            wires = [encoded(x, part, each, turn) for part, each in pairs]
        came = all_to_all_or_skip(comm, wires, out.device, partition.due)
        if x is None or wires is None or came is None:
            return None, None
        own = parts[comm.rank].segments.gathered(x)
        others = _others(comm.rank, comm.size)
        codec = self._codec_of(home, turn.step)
        mean = own / _size(comm.size, own.device)
        arrived = ((rank, SentMessage(codec, came[rank], home.segments)) for rank in others)
        add_messages_(mean, arrived, 1 / comm.size)
        apart = own if x is out or len(parts[comm.rank].segments) != 1 else own.clone()
        shares: tuple[Sent, ...] = () if joined is None else (joined,)
        if joined is None:
            shares = tuple(SentMessage(codecs[rank], wires[rank], parts[rank].segments) for rank in others)
        return mean, SentParts((DenseShare(parts[comm.rank].segments, apart, 1.0), *shares))

    def gather(
        self, mean: Tensor | None, partition: Partition, turn: Turn, out: Tensor, alpha: float
    ) -> bool:
        """Write alpha * the decoded mean of all pieces to out; return False if one is not finite."""
        home, wire, residual = partition.home, None, self._residual
        if mean is not None and residual is not None:
            mean = residual.add_to_(mean, home)
        codecs = self._codecs(partition, turn.step)
        codec = self._codec_of(home, turn.step)
        if mean is not None and self._is_finite(mean, home, codec):
            # with the first keys the two roundings would not be independent
            wire = encoded(mean, home, codec, Turn(turn.step, turn.rank, mix(turn.seed, ANSWER)))
            if residual is not None and home.numel:
                left = codec.decode_segments_add_(wire, home.segments, mean, -1.0)
                residual.keep(left, home, turn.step)
        wires = gather_or_skip(self._comm, wire, out.device, partition.due)
        if wires is None:
            return False
        partition.bucket.segments.zero_(out)
        add_messages_(out, enumerate(map(SentMessage, codecs, wires, partition.to_all.ranges)), alpha)
        return True

    def _is_finite(self, mean: Tensor, home: Layout, codec: Codec) -> bool:
        """Check a mean; on a GPU, bounded decoded values without a residual need no wait."""
        if not mean.is_cpu and self._residual is None and codec.normal[1] <= BOUNDED:
            return True
        return kernels.all_finite(mean, home.segments.merged)

    def _codecs(self, partition: Partition, step: int) -> list[Codec]:
        return [self._codec_of(part, step) for part in partition.parts]

    def _travel(
        self, x: Tensor | None, partition: Partition, turn: Turn, out: Tensor
    ) -> tuple[Tensor | None, Sent | None]:
        comm = self._comm
        if any_skips(comm, x is not None, out.device) or x is None:
            return None, None
        hops = HOPS[self._pattern](comm.rank, comm.size)

        def codec_of(part: Layout) -> Codec:
            return self._codec_of(part, turn.step)

        left: dict[int, Tensor] | None = None if self._residual is None or x is out else {}
        mean = travelling_mean(x, partition.parts, hops, codec_of, turn, comm, left)
        runs = partition.bucket.segments.merged
        kept = torch.cat([x[:0], *runs.views(x)]) if x is not out else None
        # a hop's loss is of the mean: in this rank's gradient it counts comm.size times
        lost = (DenseShare(partition.parts[i].segments, part, -comm.size) for i, part in (left or {}).items())
        return mean, SentParts((DenseShare(runs, kept, 1.0), *lost))

    def put_back(self, layout: Layout) -> None:
        if self._residual is not None:
            self._residual.put_back(self._partition(layout).home)

    @property
    def remembers(self) -> bool:
        return self._residual is not None

    @property
    def holds_back(self) -> bool:
        return self._residual is not None

    def discard(self) -> None:
        if self._residual is not None:
            self._residual.discard()

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._residual is None else self._residual.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._residual is None:
            super().load_state_dict(state)
        else:
            self._residual.load_state_dict(state)


def alike(codecs: Sequence[Codec]) -> bool:
    return list(codecs).count(codecs[0]) == len(codecs)


@lru_cache(maxsize=512)
def _others(rank: int, size: int) -> tuple[int, ...]:
    return tuple(other for other in range(size) if other != rank)


@lru_cache(maxsize=64)
def _size(size: int, device: torch.device) -> Tensor:
    """Return float32 (): a GPU multiplies by a Python number's reciprocal."""
    return torch.tensor(size, dtype=torch.float32, device=device)  # a blocking copy: other streams may use it
