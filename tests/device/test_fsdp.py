"""FSDP2's communication functions on the stand-in device, called as FSDP2 calls them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import kernels
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from laconic.exchange.no_optimiser import NoOptimiser
from laconic.fsdp.backward import OverlappedExchanges
from laconic.fsdp.backward_pass import BackwardPass
from laconic.fsdp.gather import CodedAllGather
from laconic.fsdp.memory import ShardMemory
from laconic.fsdp.reduce_scatter import Scatter, ScatterMean, Shards
from laconic.fsdp.replicas import Replicas
from laconic.fsdp.waiting import WaitingGradients
from tests.device.worlds import CPU, GPU
from tests.laws.table import given, same

N = 4096


def on_both(play: Any) -> None:
    """`play(comm, device)` gives the same tensors on both devices."""
    with kernels.using("reference"):
        found, expected = (Loopback.run(2, lambda comm, to=to: play(comm, to)) for to in (GPU, CPU))
    for one, other in zip(found, expected, strict=True):
        assert all(value.device == GPU for value in one)
        assert all(same(value.cpu(), cpu) for value, cpu in zip(one, other, strict=True))


@pytest.mark.parametrize("void_at", [None, 0, 1])
@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reduce_scatter(dtype: torch.dtype, remembers: bool, void_at: int | None) -> None:
    def play(comm: Loopback, device: torch.device) -> list[Tensor]:
        shards, memory = Shards(Metered(comm), seed=3), ShardMemory(1.0) if remembers else None
        reducer: Any = lift("cgx(bits=4)").routes[0].reducer
        scatter = Scatter(reducer, nn.Module(), shards, memory)
        scatter.beside = OverlappedExchanges("shards")
        mean, found = ScatterMean(scatter, "layer"), []
        for step in range(3):
            shards.step = step
            x = (given("heavy", N) * (1 + comm.rank)).to(device, dtype)
            if step == void_at and comm.rank == 1:
                x[17] = torch.inf
            out = mean.allocate((N // 2,), dtype=dtype, device=device)
            mean(out, x, None, dist.ReduceOp.AVG)  # type: ignore[arg-type]
            found.append(out)
        scatter.beside.close()
        return [*found, *scatter.state_dict().values()]

    on_both(play)


@pytest.mark.parametrize("spec", ["minmax(bits=8)", "rotated(minmax(bits=4))", "cast('bf16')"])
def test_the_all_gather(spec: str) -> None:
    codec: Any = parse(spec)

    def play(comm: Loopback, device: torch.device) -> list[Tensor]:
        gather, found = CodedAllGather(codec, Shards(Metered(comm), seed=3), "layer", None), []
        for x in (given("heavy", N), torch.full((N,), torch.nan), torch.arange(N)):
            out = gather.allocate((2 * N,), dtype=x.dtype, device=device)
            gather(out, (x * (1 + comm.rank)).to(device), None)  # type: ignore[arg-type]
            found.append(out)
        return found

    with mock.patch.object(dist, "get_world_size", lambda group: 2):
        on_both(play)


@pytest.mark.parametrize("spec", ["cgx(bits=4)", "topk(density=0.05)", "qsgd(levels=7)"])
def test_the_exchange_between_replicas(spec: str) -> None:
    module: Any = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_group=None))

    def play(comm: Loopback, device: torch.device) -> list[Tensor]:
        layout = Layout.of([("weight", (64, 60)), ("bias", (256,))])
        replicas = Replicas.__new__(Replicas)  # without a model under fully_shard, which needs a GPU's groups
        replicas._layouts, replicas._pass = {"layer": layout}, BackwardPass()
        replicas._waiting = WaitingGradients()
        replicas.exchange = Attached(lift(spec), layout, Metered(comm), NoOptimiser(), 3)
        replicas._beside, found = OverlappedExchanges("replicas"), []
        for step in range(3):
            reduced = (given("heavy", N) * (1 + comm.rank + step)).to(device)
            replicas.mean_(reduced, "layer", module)
            replicas._end()
            found.append(reduced)
        replicas._beside.close()
        return [*found, *replicas.state_dict().values()]

    engine = SimpleNamespace(queue_callback=lambda call: None)
    with mock.patch.object(torch.autograd.Variable, "_execution_engine", engine):
        on_both(play)
