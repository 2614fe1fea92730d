"""On a GPU, with NCCL and one rank: tensors stay on the device, through buckets and under fully_shard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.comm.communication_thread import CommunicationThread
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.spec import parse
from laconic.fsdp.reduce_scatter import Scatter, ScatterMean, Shards
from tests.dist.nets import SGD, batch, net

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICE = torch.device("cuda", 0)
METHODS = (
    "fp16()",
    "dgc(density=0.05)",
    "oktopk(density=0.05)",
    "deft(density=0.05)",
    "micro(density=0.05)",
    "powersgd(rank=2)",
    "cgx(bits=8, min_size=100)",
)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 30) -> list[float]:
    """Of the same batch, step after step."""
    x, y = (part.to(DEVICE) for part in batch(0, 0))
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("spec", METHODS)
def test_buckets_stay_on_the_device(alone: None, spec: str) -> None:
    model = DistributedDataParallel(net().to(DEVICE), device_ids=[0], bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, spec)
    seen = losses(model, optimizer)
    held = {key: value for key, value in handle.state_dict()["tensors"].items() if "/residual/" in key}
    assert handle.buckets.per_step > 1 and seen[-1] < 0.7 * seen[0]
    assert all(p.grad is not None and p.grad.device == DEVICE for p in model.parameters())
    assert all(value.device == DEVICE for value in held.values())
    handle.remove()


def test_a_sharded_model_stays_on_the_device(alone: None) -> None:
    """One rank has nothing to reduce: it is attached, trains and is removed."""
    model = net().to(DEVICE)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    handle = laconic.compress(model, optimizer, "cgx(bits=4)")
    seen = losses(model, optimizer)
    assert seen[-1] < 0.7 * seen[0]
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and parameter.to_local().device == DEVICE
    handle.remove()


def test_a_reduce_scatter_on_the_device_is_that_on_the_host() -> None:
    """Two ranks as threads, 8 bits. A level may round the other way: within a unit, 1/255 of the range."""

    def play(comm: Loopback, device: torch.device) -> Tensor:
        reducer = parse("scatter_reduce(minmax(bits=8))")
        scatter = ScatterMean(Scatter(reducer, nn.Module(), Shards(Metered(comm), 0)), "layer")
        x = torch.randn(4096, generator=torch.Generator().manual_seed(comm.rank)).to(device)
        out = torch.empty(2048, device=device)
        scatter(out, x, None, dist.ReduceOp.AVG)  # type: ignore[arg-type]
        assert out.device == device
        return out.cpu()

    host = Loopback.run(2, lambda comm: play(comm, torch.device("cpu")))
    there = Loopback.run(2, lambda comm: play(comm, DEVICE))
    for one, other in zip(host, there, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=10 / 255)


def test_jobs_run_beside_the_caller_in_the_order_of_what_they_read() -> None:
    thread = CommunicationThread("beside", DEVICE)
    x = torch.zeros(1 << 20, device=DEVICE)
    streams = []

    def twice() -> Tensor:
        streams.append(torch.cuda.current_stream(DEVICE))
        return x * 2

    for _ in range(50):
        x += 1  # still under way when the job is submitted
    answer = thread.submit(twice)
    assert torch.equal(answer.wait(), torch.full_like(x, 100.0))
    assert streams[0] != torch.cuda.current_stream(DEVICE)
    thread.close()
