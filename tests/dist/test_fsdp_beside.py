"""Under `fully_shard` backward goes on while gradients are exchanged, but where their values are read."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import laconic
from laconic.exchange.attached import Attached
from laconic.fsdp.reduce_scatter import Scatter
from tests.dist.pool import on_ranks
from tests.dist.test_fsdp import LONG

EXACT = {False: "scatter_reduce(dense())", True: "sum()"}


def stack(replicated: bool = False, **kinds: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Two layers, each under `fully_shard`, compressed exactly."""
    torch.manual_seed(0)
    shape, names = ((1, 2), ("machines", "shards")) if not replicated else ((2, 1), ("machines", "shards"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh if replicated else mesh["shards"], **kinds)
    fully_shard(model, mesh=mesh if replicated else mesh["shards"], **kinds)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    laconic.compress(model, optimizer, EXACT[replicated])
    return model, optimizer


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.full_tensor().clone() for p in model.parameters()]


def inputs(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def waits_for_the_first_layer(replicated: bool) -> bool:
    """Hold the exchange of the last layer until the first one's backward has begun."""
    model, _ = stack(replicated)
    first_layer = threading.Event()
    kind, name = (Attached, "mean_") if replicated else (Scatter, "mean")
    plain, held = getattr(kind, name), []

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        if not held:
            held.append(first_layer.wait(timeout=120))
        return plain(self, *args, **options)

    setattr(kind, name, slow)
    try:
        hidden = model[0](inputs(0))
        hidden.register_hook(lambda _: first_layer.set())
        model[1](hidden).square().sum().backward()
    finally:
        setattr(kind, name, plain)
    return held == [True]


@pytest.mark.parametrize("replicated", [False, True])
def test_backward_goes_on_while_a_shard_is_exchanged(pool: Any, replicated: bool) -> None:
    assert all(pool.run(2, waits_for_the_first_layer, replicated, timeout_s=LONG))


@on_ranks(2, [False, True], timeout_s=LONG)
def test_a_gradient_that_is_read_at_once_is_there(replicated: bool) -> None:
    """Gradients that FSDP2 reads at once: added to others, given to hooks, cast; and as they must be."""
    model, _ = stack(replicated)
    alone = []
    for step in range(2):
        model.zero_grad()
        model(inputs(step)).square().sum().backward()
        alone.append(gradients(model))
    first, second = alone
    model.zero_grad()
    for step in range(2):
        model(inputs(step)).square().sum().backward()
    got, wanted = [gradients(model)], [[a + b for a, b in zip(first, second, strict=True)]]

    model.zero_grad()
    seen: dict[int, Tensor] = {}
    for i, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda p, i=i: seen.update({i: p.grad.to_local().clone()})
        )
    model(inputs(0)).square().sum().backward()
    got.append([seen[i] for i in range(len(seen))])
    wanted.append([p.grad.to_local() for p in model.parameters()])

    half, _ = stack(replicated, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    half(inputs(0)).square().sum().backward()
    got.append([grad.bfloat16() for grad in gradients(half)])
    wanted.append([grad.bfloat16() for grad in first])
    for one, other in zip(got, wanted, strict=True):
        assert len(one) == len(other) == 4
        for a, b in zip(one, other, strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=0.02, atol=1e-6 + 0.02 * float(b.abs().max()))


def fails_beside() -> str:
    """What backward says of a job that failed."""
    model, _ = stack()
    plain = Scatter.mean

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no more memory")

    Scatter.mean = broken  # type: ignore[assignment, method-assign]
    try:
        with pytest.raises(RuntimeError) as caught:
            model(inputs(0)).square().sum().backward()
    finally:
        Scatter.mean = plain  # type: ignore[method-assign]
    return str(caught.value)


def test_a_failed_exchange_is_told_by_backward(pool: Any) -> None:
    for rank, said in enumerate(pool.run(2, fails_beside, timeout_s=LONG)):
        assert said == f"shards of rank {rank}: ValueError: no more memory"
