"""Gossip of encoded parameters on a fixed graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.codecs.dense import Dense
from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.layout_codec import LayoutCodec, Part
from laconic.core.turn import Turn
from laconic.exchange.method import lift_codec
from laconic.feedback.memory.contraction import safe_gain
from laconic.strategies.gossip.mixing import Weights, is_regular, metropolis, uniform
from laconic.strategies.gossip.mixing.gossip_strategy import GossipStrategy
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes

LENGTH = 8  # before a message whose size may vary


class CodedGossip(GossipStrategy):
    compressor: Any
    gamma: float

    def __post_init__(self) -> None:
        _ = self.codec
        super().__post_init__()
        arguments.number(f"{self.name}: gamma", self.gamma, above=0, most=1)

    @property
    def codec(self) -> Codec:
        return lift_codec(self.compressor)

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        if not self.topology.symmetric or self.topology.period(size) != 1:
            raise SpecError(
                f"{self.name} needs the same neighbours at every step, both ways, and those of"
                f" {self.topology!r} change or do not answer: use ring(), torus(), complete() or a graph()"
            )
        shapes = [tuple(each.shape) for group in optimizer.param_groups for each in group["params"]]
        coded_matrices(self.codec, Layout.of((str(i), shape) for i, shape in enumerate(shapes)), damped=True)


def coded_matrices(codec: Codec, layout: Layout, *, damped: bool) -> LayoutCodec:
    """Return the codec of whole models: matrices by this codec, vectors unchanged.

    `damped`: damp an unbiased codec if a difference to a copy would otherwise grow. Raises `SpecError` if a
    residual would grow without bound.
    """
    coded = layout.where(lambda entry: len(entry.shape) > 1)
    plain = layout.where(lambda entry: len(entry.shape) <= 1)
    gain = safe_gain(codec, coded, damped=codec.unbiased)
    return LayoutCodec((Part(coded, codec, gain if damped else 1.0), Part(plain, Dense())))


class BoundCodedGossip(BoundStrategy):
    def __init__(self, config: CodedGossip, replica: Replica, comm: Metered, seed: int) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.seed = seed
        self.wires = coded_matrices(config.codec, replica.layout, damped=True)
        mixing = uniform if is_regular(config.topology, comm.size) else metropolis
        self.shares: Weights = mixing(config.topology, comm.rank, comm.size, 0)

    @property
    def turn(self) -> Turn:
        return Turn(self.steps, self.comm.rank, self.seed)

    def notes(self) -> Notes:
        return {"peers": sorted(self.shares.out)}

    def swap(self, wire: Tensor) -> dict[int, Tensor]:
        with self.comm.phase("gossip"):
            return swap(self.comm, wire, sorted(self.shares.into), self.wires.nbytes)

    def add_message_(self, wire: Tensor, out: Tensor, alpha: float) -> Tensor:
        return self.wires.decode_add_(wire, out, self.steps, alpha)


def swap(comm: Comm, wire: Tensor, neighbours: list[int], nbytes: int | None) -> dict[int, Tensor]:
    lengths = {rank: torch.tensor([nbytes or 0], dtype=torch.int64, device="cpu") for rank in neighbours}
    if nbytes is None:
        comm.exchange(
            dict.fromkeys(neighbours, torch.tensor([wire.numel()], dtype=torch.int64, device="cpu")), lengths
        )
    came = {rank: wire.new_empty(int(length)) for rank, length in lengths.items()}
    comm.exchange(dict.fromkeys(neighbours, wire), came)
    return came
