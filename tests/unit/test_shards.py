"""A sharded model's reduce-scatter, called as FSDP2 calls it, on threads as ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.unit.shared import for_each
from torch import Tensor, nn

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.spec import parse
from laconic.fsdp.memory import STORE, ShardMemory
from laconic.fsdp.reduce_scatter import Scatter, ScatterMean, Shards


def scatter_on(comm: Loopback, spec: str) -> tuple[Shards, ScatterMean]:
    shards = Shards(Metered(comm), seed=3)
    return shards, ScatterMean(Scatter(parse(spec), nn.Module(), shards), "layer")


def shard(scatter: ScatterMean, x: Tensor, size: int) -> Tensor:
    """This rank's shard of the mean of x."""
    out = torch.full((x.numel() // size,), 7.0)
    assert scatter(out, x.clone(), None, dist.ReduceOp.AVG) is None  # type: ignore[arg-type]
    return out


@for_each("sizes", [(8, 12), (8, 4), (2, 8), (4, 8, 4)])
def test_a_module_whose_gradients_come_and_go_is_cut_anew(sizes: tuple[int, ...]) -> None:
    """FSDP2 leaves out the parameters that have no gradient in this step."""

    def play(comm: Loopback) -> list[Tensor]:
        _, scatter = scatter_on(comm, "scatter_reduce(dense())")
        return [shard(scatter, torch.arange(float(n)) * (1 + comm.rank), 2) for n in sizes]

    for one, other, n in zip(*Loopback.run(2, play), sizes, strict=True):
        assert torch.equal(torch.cat([one, other]), torch.arange(float(n)) * 1.5)


def test_each_micro_batch_of_a_step_is_rounded_by_bits_of_its_own() -> None:
    """Else their errors would add up, not average out; the next step's first call draws others again."""

    def play(comm: Loopback) -> tuple[list[Tensor], list[Tensor], Tensor]:
        x = torch.randn(4096, generator=torch.Generator().manual_seed(comm.rank))

        def step(shards: Shards, scatter: ScatterMean, number: int) -> list[Tensor]:
            shards.step = number
            return [shard(scatter, x, 2) for _ in range(16)]

        spec = "scatter_reduce(minmax(bits=2, rounding='stochastic'))"
        same, anew = scatter_on(comm, spec), scatter_on(comm, spec)
        step(*same, 0)
        return step(*same, 1), step(*anew, 1), shard(scatter_on(comm, "scatter_reduce(dense())")[1], x, 2)

    for first, again, plain in Loopback.run(2, play):
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), "a new count"
        assert not any(torch.equal(first[0], other) for other in first[1:])
        one, mean = (first[0] - plain).norm(), (sum(first) / 16 - plain).norm()
        assert mean < 0.3 * one, "1/4 of it, for errors that are independent"


def test_residuals_of_shards_decay() -> None:
    memory, x = ShardMemory(decay=0.5), torch.linspace(-1, 1, 64)
    wire = STORE.encode(x, 0)
    memory.keep(wire, 64, "layer")
    found = torch.ones(64)
    memory.add_to_(found, "layer")
    assert torch.equal(found, 1 + 0.5 * STORE.decode(wire, 64))
