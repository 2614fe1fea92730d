"""Skipped steps under DDP, FSDP2 and HSDP: no trace of them in any memory, on any rank, in any shard."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import NonFiniteError
from tests.dist.nets import SGD, agree, batch, flat, net
from tests.dist.runs import MANY

LONG = 240.0
BAD = 5  # the step of the case
SPECS = ("cgx()", "topk(density=0.1)", "sign()", "powersgd(rank=1)", "dgc(density=0.1)", "qsgd()")


def huge_and_inf(spec: str | None, clip: bool) -> list[float]:
    """The largest weight after each step; in one, a rank's gradient is 1e12 in a layer and Inf in another."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler, largest, rank = torch.amp.GradScaler("cpu", init_scale=256.0), [], dist.get_rank()
    if spec is not None:
        laconic.compress(model, optimizer, spec, scaler=scaler)
    for step in range(12):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = (model(x) - x[:, :3]).square().mean()
        if step == BAD and rank == 1:
            loss = loss + model.module[0].weight.sum() * 1e12 + model.module[2].weight.sum() * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the gradient of .* was changed")  # clipped velocity
            scaler.step(optimizer)
        scaler.update()
        largest.append(float(model.module[0].weight.detach().abs().max()))
    return largest


@pytest.mark.parametrize("clip", [False, True])
def test_a_huge_gradient_beside_inf_never_comes_back(pool: Any, clip: bool) -> None:
    for spec in (None, *SPECS):
        for largest in pool.run(2, huge_and_inf, spec, clip):
            assert largest[BAD] == largest[BAD - 1], spec
            assert max(largest) < 0.5, (spec, largest)


def bad_weight(spec: str, scaled: bool, dtype: torch.dtype, bad: int) -> tuple[bool, list[str], bool]:
    """A bad entry in the weight of this number, in the step after two: is the step skipped, what changes in
    memory, and are replicas equal after another step?"""
    model = DistributedDataParallel(net().to(dtype), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    handle = laconic.compress(model, optimizer, spec, scaler=scaler)

    def step(number: int, bad: int | None) -> bool:
        optimizer.zero_grad()
        x, y = batch(dist.get_rank(), number)
        loss, before = nn.functional.cross_entropy(model(x.to(dtype)).float(), y), flat(model)
        if bad is not None and dist.get_rank() == 1:
            weights = [each for each in model.parameters() if each.dim() > 1]
            loss = loss + (weights[0].sum() + weights[-1].sum()).float() * 1e3
            loss = loss + weights[bad].flatten()[5].float() * torch.inf
        (loss if scaler is None else scaler.scale(loss)).backward()
        try:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        except NonFiniteError as error:
            assert "as before the step" in str(error)
        return torch.equal(before, flat(model))

    for number in range(2):
        assert not step(number, None)
    before = {key: value.clone() for key, value in handle.state_dict()["tensors"].items()}
    skipped = step(2, bad)
    after = handle.state_dict()["tensors"]
    wrong = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert not step(3, None)
    return skipped, wrong, agree(model)


@pytest.mark.parametrize(
    "spec", ["dgc(density=0.1, clip=1.0)", "topk(density=0.1)", "powersgd(rank=1)", "stc()"]
)
def test_memory_is_as_before_whichever_bucket_is_bad(pool: Any, spec: str) -> None:
    for number, bad in enumerate((0, 1, -1)):
        scaled, dtype = bool(number % 2), (torch.float32, torch.float32, torch.bfloat16)[number]
        for found in pool.run(2, bad_weight, spec, scaled, dtype, bad):
            assert found == (True, [], True), (spec, scaled, dtype, bad)


def too_large_for_half(spec: str) -> tuple[bool, list[str]]:
    """What is left over and the gradient fit into float16; their sum does not, in one small parameter."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).half()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = laconic.compress(model, optimizer, spec)
    for _ in range(3):
        before = handle.state_dict()["tensors"]
        weight = model.module[0].weight
        slopes = torch.linspace(0.9, 1.0, weight.numel()).view_as(weight).half()
        optimizer.zero_grad()
        (model(torch.zeros(1, 8).half()).sum() + (weight * slopes).sum().float() * 4e4).backward()
        try:
            optimizer.step()
        except NonFiniteError:
            after = handle.state_dict()["tensors"]
            return True, [key for key in before if not torch.equal(before[key], after[key])]
    return False, []


def test_a_mean_that_does_not_fit_into_16_bits_leaves_no_trace(pool: Any) -> None:
    for found in pool.run(2, too_large_for_half, "topk(density=0.25)"):
        assert found == (True, [])


def sparse_and_dense() -> tuple[bool, list[str]]:
    """Inf in the gradient of a sparse embedding, beside a layer with a memory."""
    torch.manual_seed(0)
    words, layer = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 8)
    model = DistributedDataParallel(nn.Sequential(words, layer), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = laconic.compress(model, optimizer, "topk(density=0.1)")
    for step in range(3):
        before = handle.state_dict()["tensors"]
        optimizer.zero_grad()
        loss = model(torch.arange(4) + step).square().sum()
        if step == 2 and dist.get_rank() == 1:
            loss = loss + layer.weight.sum() * 1e12 + words(torch.tensor([7])).sum() * torch.inf
        loss.backward()
        try:
            optimizer.step()
        except NonFiniteError:
            after = handle.state_dict()["tensors"]
            return step == 2, [key for key in before if not torch.equal(before[key], after[key])]
    return False, []


def test_a_bad_sparse_gradient_leaves_no_trace_in_dense_ones(pool: Any) -> None:
    assert pool.run(2, sparse_and_dense) == [(True, [])] * 2


def sharded(spec: str, machines: int, bad: str) -> tuple[bool, list[str], bool]:
    """Does a rank have a gradient without NaN, what changes in its memory, and is the next step finite?"""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1, bias=False)
    )
    size = dist.get_world_size()
    names = ("machines", "shards")
    shape = (machines, size // machines)
    mesh = (
        init_device_mesh("cpu", shape, mesh_dim_names=names)
        if machines > 1
        else init_device_mesh("cpu", (size,))
    )
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = laconic.compress(model, optimizer, spec)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="FSDP2-wrapped module .* returned a view"
            )  # by the hook
            loss = model(x.requires_grad_()).square().mean()  # a hook of the first layer wants that
        loss.backward()

    for step in range(3):
        backward(step)
        optimizer.step()
    before = {key: value.clone() for key, value in handle.state_dict()["memory"].items()}
    hook = None
    if dist.get_rank() == size - 1:  # one entry of one weight, which one shard has
        hook = model[{"first": 0, "middle": 2, "last": 4}[bad]].register_full_backward_pre_hook(_spoil)
    backward(3)
    if hook is not None:
        hook.remove()
    grads = [each.grad.to_local() for each in model.parameters()]
    clean = any(bool(grad.isfinite().any()) for grad in grads if grad.numel())
    after = handle.state_dict()["memory"]
    wrong = [key for key in before.keys() | after.keys() if not torch.equal(before[key], after[key])]
    assert before
    backward(4)
    return clean, wrong, all(bool(each.grad.to_local().isfinite().all()) for each in model.parameters())


def _spoil(module: nn.Module, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    bad = grads[0].clone()
    bad[0, 0] = torch.inf
    bad[1] = 1e12
    return (bad,)


@pytest.mark.parametrize(
    ("spec", "machines"),
    [("error_fed(scatter_reduce(minmax(bits=4, block=64)))", 1), ("topk(density=0.1)", 2)],
)
def test_all_shards_of_all_machines_skip_and_remember_nothing(pool: Any, spec: str, machines: int) -> None:
    for bad in ("first", "middle", "last"):
        for found in pool.run(4, sharded, spec, machines, bad, timeout_s=LONG):
            assert found == (False, [], True), (spec, bad)
