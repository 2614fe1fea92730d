"""HSDP in real processes over gloo: exact shards within, a method between replicas."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.core.errors import AttachError, StateError
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.fsdp.handle import close
from laconic.fsdp.models import param_group_of
from tests.dist.nets import GPT
from tests.dist.pool import on_ranks
from tests.dist.test_fsdp import LONG, close_to_the_mean, loss_of, step_on, whole

STEPS = 30
FED = "topk(density=0.05)"


def replicated_gpt(machines: int) -> tuple[GPT, torch.optim.Optimizer]:
    """Sharded within each of so many machines, which have an equal share of the ranks."""
    torch.manual_seed(0)
    shape = (machines, dist.get_world_size() // machines)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("machines", "shards"))
    model = GPT()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(spec: str | None, parameters: str | None = None, steps: int = STEPS) -> Any:
    """Losses, the handle's figures and all parameters."""
    model, optimizer = replicated_gpt(2)
    handle = None if spec is None else laconic.compress(model, optimizer, spec, parameters=parameters)
    losses = [step_on(model, optimizer, step) for step in range(steps)]
    return losses, handle and handle.stats(), whole(model)


def test_replicas_train_to_the_dense_loss(pool: Any) -> None:
    """In few bits between replicas, and gathered in few bits within: the loss of plain HSDP, within 2 %."""
    few = "error_fed(scatter_reduce(minmax(bits=4, block=64)))"
    cases = ((None,), ("cgx(bits=8)",), (few, "minmax(bits=8)"))
    plain, *others = (found for _, found in pool.each(4, train, cases, timeout_s=2 * LONG))
    dense = plain[0][0]
    assert sum(dense[-10:]) < 0.7 * sum(dense[:10]), "it does learn"
    for smaller, results in zip((2, 3), others, strict=True):
        for losses, stats, weights in results:
            assert sum(losses[-10:]) == pytest.approx(sum(dense[-10:]), rel=0.02)
            assert losses != dense and stats.steps == STEPS and stats.ratio > smaller
            assert torch.equal(weights, results[0][2])


@on_ranks(4, (("sum()", 2), ("cgx(bits=8)", 1)), timeout_s=LONG)
def test_the_gradients_are_the_mean_of_all_ranks(spec: str, backwards: int) -> None:
    model, optimizer = replicated_gpt(2)
    laconic.compress(model, optimizer, spec)
    torch.manual_seed(0)
    plain = GPT()
    for step in range(backwards):
        loss_of(model, step).backward()
        loss_of(plain, step).backward()
    close_to_the_mean(model, plain, 0.01 if "cgx" in spec else 1e-6)


@on_ranks(4, timeout_s=LONG)
def test_machines_exchange_once_for_several_passes() -> None:
    """As fully_shard does after set_requires_all_reduce(False)."""
    model, optimizer = replicated_gpt(2)
    handle = laconic.compress(model, optimizer, "sum()")
    torch.manual_seed(0)
    plain = GPT()
    for step in range(3):
        model.set_requires_all_reduce(step == 2)
        loss_of(model, step).backward()
        loss_of(plain, step).backward()
        assert handle.state_dict()["exchanges"] == (step == 2)
    close_to_the_mean(model, plain, 1e-6)


def of_a_pair(spec: str | None) -> Tensor:
    """Weights after two steps of a model with two modules in one group of shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machines", "shards"))
    fully_shard([model[2], model[3]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if spec is not None:
        laconic.compress(model, optimizer, spec)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().sum().backward()
        optimizer.step()
    return whole(model)


def test_modules_that_share_a_group_of_shards_are_one(pool: Any) -> None:
    """dense() has the bits of plain HSDP after fully_shard([a, b])."""
    plain = pool.run(4, of_a_pair, None, timeout_s=LONG)
    for weights, expected in zip(pool.run(4, of_a_pair, "dense()", timeout_s=LONG), plain, strict=True):
        assert torch.equal(weights, expected)


@on_ranks(4, timeout_s=LONG)
def test_a_shard_is_the_mean_of_what_machines_send_of_it() -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 32, bias=False)
    start = model.weight.detach().clone()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("machines", "shards")))
    codec = parse("minmax(bits=2)")
    laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), f"gather({codec!r})")
    inputs = [torch.randn(7, 40, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    model(inputs[dist.get_rank()]).square().sum().backward()
    whole_of = [(2 * (x @ start.T).T @ x) for x in inputs]
    shard = dist.get_rank() % 2
    machines = [(whole_of[0] + whole_of[1]) / 2, (whole_of[2] + whole_of[3]) / 2]
    expected = torch.zeros(16 * 40)
    for machine, mean in enumerate(machines):
        part = mean.chunk(2)[shard].flatten().contiguous()
        codec.decode_add_(codec.encode(part, Turn(0, machine).own("weight")), expected, 0.5)
    assert (
        (model.weight.grad.to_local().flatten() - expected).abs() > 1e-3
    ).sum() <= 2  # an entry may round the other way


def looked_at(spec: str | None, removes: bool) -> tuple[list[float], Tensor]:
    """Losses and weights where a forward pass without gradients stands between backward() and step()."""
    model, optimizer = replicated_gpt(2)
    if spec is not None:
        handle = laconic.compress(model, optimizer, spec)
        if removes:
            loss_of(model, 0).backward()  # a handle that was at work
            handle.remove()
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        with torch.no_grad():
            loss_of(model, step)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, whole(model)


@pytest.mark.parametrize("removes", [False, True])
def test_a_forward_pass_between_backward_and_step_changes_nothing(pool: Any, removes: bool) -> None:
    """dense() has the bits of plain HSDP then too."""
    plain = pool.run(4, looked_at, None, False, timeout_s=LONG)
    ours = pool.run(4, looked_at, "dense()", removes, timeout_s=LONG)
    for (losses, weights), (expected, whole_of) in zip(ours, plain, strict=True):
        assert losses == expected and torch.equal(weights, whole_of)


@on_ranks(4, timeout_s=LONG)
def test_a_resumed_run_ends_with_the_same_bits() -> None:
    """Parameters after 6 steps; and after 3 and 3 more, with a new handle and the state of the first."""
    found = []
    for stops in (False, True):
        model, optimizer = replicated_gpt(2)
        handle = laconic.compress(model, optimizer, FED)
        for step in range(6):
            if step == 3 and stops:
                state = handle.state_dict()
                handle.remove()
                handle = laconic.compress(model, optimizer, FED)
                handle.load_state_dict(state)
            step_on(model, optimizer, step)
        found.append(whole(model))
    assert torch.equal(*found)
    with pytest.raises(StateError, match="the saved state is of rank 9"):
        handle.load_state_dict({**state, "rank": 9})


@on_ranks(4, timeout_s=LONG)
def test_removed_it_is_plain_hsdp_and_what_cannot_go_is_refused() -> None:
    plain = train(None, steps=6)[2]
    model, optimizer = replicated_gpt(2)
    mine = "cgx(bits=4)" if dist.get_rank() else "cgx(bits=5)"
    inside = "the optimiser steps"
    for spec, words in (("dgc(0.01)", inside), ("onebit_adam(3)", inside), (mine, "the spec differs")):
        with pytest.raises(AttachError, match=words):
            laconic.compress(model, optimizer, spec)
    for _ in range(2):  # dropped with its optimiser, without remove()
        optimizer = torch.optim.AdamW(model.parameters())
        handle = laconic.compress(model, optimizer, "cgx(bits=2)")
        step_on(model, optimizer, 0)
        assert handle.stats().payload_sent
        del handle, optimizer
        gc.collect()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = laconic.compress(model, optimizer, "cgx(bits=2)")
    handle.remove()
    fresh, _ = replicated_gpt(2)
    model.load_state_dict(fresh.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(6):
        step_on(model, optimizer, step)
    assert torch.equal(plain, whole(model)) and handle.stats().payload_sent == 0


class Partly(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


@on_ranks(2, timeout_s=LONG)
def test_a_step_without_all_gradients_says_so() -> None:
    model = Partly()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("machines", "shards")))
    laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), "cgx()")
    loss = model(torch.ones(3, 4)).sum()
    with pytest.raises(
        AttachError, match="the model has gradients for 20 of its 40 sharded elements in this step"
    ):
        loss.backward()


@on_ranks(2, timeout_s=LONG)
def test_other_trained_parameters_than_at_the_start_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("machines", "shards")))
    model[1].weight.requires_grad_(False)
    laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk(density=0.1)")
    model(torch.ones(3, 8)).sum().backward()
    model[1].weight.requires_grad_(True)
    model[0].weight.requires_grad_(False)
    model.zero_grad()
    loss = model(torch.ones(3, 8)).sum()
    with pytest.raises(
        AttachError, match="other parameters of the model are trained than when it was compressed"
    ):
        loss.backward()


@on_ranks(2, timeout_s=LONG)
def test_a_saved_state_copies_the_memory_once() -> None:
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("machines", "shards")))
    handle = laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), FED)
    exchange = handle._gradients.exchange
    handle.state_dict()
    with mock.patch.object(exchange, "state_dict", wraps=exchange.state_dict) as copies:
        handle.state_dict()
    assert copies.call_count == 1


@on_ranks(2, ("sum()", FED), timeout_s=LONG)
def test_a_failed_attachment_leaves_plain_hsdp(spec: str) -> None:
    """After an error in the last step of it: no thread, no hook; and the model can be compressed again."""
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("machines", "shards")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {*threading.enumerate()}
    closed = mock.patch("laconic.fsdp.handle.close", wraps=close)
    fails = mock.patch("laconic.fsdp.handle.after_steps", side_effect=ZeroDivisionError)
    with closed as closing, fails, pytest.raises(ZeroDivisionError):
        laconic.compress(model, optimizer, spec)
    assert closing.called and param_group_of(model)._all_reduce_hook is None
    deadline = time.monotonic() + 60.0
    while any(each.name.startswith("replicas of") for each in {*threading.enumerate()} - before):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    laconic.compress(model, optimizer, spec)
    model(torch.ones(1, 8)).sum().backward()


class Checkpointed(nn.Module):
    """A layer with reentrant checkpointing inside: each call gets a gradient of its own from autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, x, use_reentrant=True)
        return out


class Twice(nn.Module):
    """Calls one of its blocks twice, with others around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(8, 8), Checkpointed(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.shared(self.first(self.shared(x).tanh()).tanh()).tanh())
        return out


def sharded_twice(**options: Any) -> tuple[nn.Module, nn.Module]:
    """A model whose block is called twice, in shards with replicas; and the same model, plain."""
    torch.manual_seed(0)
    model = Twice()
    plain = Twice()
    plain.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machines", "shards"))
    for layer in (model.first, model.shared, model.last):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, plain


def loss_of_twice(model: nn.Module, step: int, factor: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(4, 8, generator=generator).requires_grad_()
    loss: Tensor = model(x).square().mean() * factor
    return loss


@on_ranks(4, (torch.float32, torch.bfloat16), timeout_s=LONG)
def test_a_module_called_twice_has_the_gradients_of_both_calls(dtype: torch.dtype) -> None:
    """Also on top of earlier gradients, with two losses at once, and in a second pass through one graph.

    FSDP2 itself adds them up: autograd gives it both, one after the other.
    """
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype)}
    model, plain = sharded_twice(**options)
    handle = laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), "sum()")
    exact = 1e-6 if dtype == torch.float32 else 0.02
    for each in (model, plain):
        loss_of_twice(each, 0).backward()
        (loss_of_twice(each, 1) + loss_of_twice(each, 2)).backward()
        loss = loss_of_twice(each, 3)
        loss.backward(retain_graph=True)
        loss.backward()
    assert handle.state_dict()["exchanges"] == 4
    close_to_the_mean(model, plain, exact)


@on_ranks(4, timeout_s=LONG)
def test_a_module_called_twice_keeps_what_was_not_sent_of_both_gradients() -> None:
    """The sum of what steps send and of the residual is the sum of gradients; a skipped step leaves all."""
    model, plain = sharded_twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = laconic.compress(model, optimizer, "topk(density=0.2)")
    for step in range(3):
        loss_of_twice(model, step).backward()
        loss_of_twice(plain, step).backward()
    before = handle.state_dict()["memory"]
    sums = {name: each.grad.to_local().clone() for name, each in model.named_parameters()}
    loss_of_twice(model, 3, factor=float("inf") if dist.get_rank() == 1 else 1.0).backward()
    assert all(each.grad.to_local().isnan().all() for each in model.parameters())
    after = handle.state_dict()["memory"]
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    for (name, parameter), exact in zip(model.named_parameters(), plain.parameters(), strict=True):
        mean, sent = exact.grad / 4, sums[name]
        dist.all_reduce(mean)
        left = torch.zeros_like(sent)  # of biases, which travel whole
        for key, value in after.items():
            if key.endswith(f"residual/{name}"):
                left = value.flatten()[: sent.numel()].view_as(sent) / 2
        dist.all_reduce(left, group=parameter.device_mesh.get_group(0))
        whole_of = {"shape": parameter.shape, "stride": parameter.stride()}
        found = DTensor.from_local(sent + left, parameter.device_mesh, parameter.placements, **whole_of)
        assert torch.allclose(found.full_tensor(), mean, atol=1e-6)


@on_ranks(4, timeout_s=LONG)
def test_machines_that_have_called_a_module_more_often_exchange_in_one_order() -> None:
    """One machine alone looks at the model between steps, which counts calls that get no gradient."""
    model, plain = sharded_twice()
    handle = laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), "sum()")
    for step in range(3):
        if step and dist.get_rank() < 2:
            with torch.no_grad():
                model.first(torch.ones(1, 8))
        for each in (model, plain):
            loss_of_twice(each, step).backward()
    assert handle.state_dict()["exchanges"] == 3
    close_to_the_mean(model, plain, 1e-6)


@on_ranks(2, timeout_s=LONG)
def test_a_hook_that_would_see_a_gradient_before_its_exchange_is_refused() -> None:
    model = Twice()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("machines", "shards"))
    fully_shard(model.shared, mesh=mesh)
    fully_shard(model, mesh=mesh)
    laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), "sum()")
    model.shared.layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    loss = loss_of_twice(model, 0)
    with pytest.raises(AttachError, match="shared is called several times in a forward pass"):
        loss.backward()


def warnings_of_a_gather() -> list[tuple[str, str]]:
    model, optimizer = replicated_gpt(4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        laconic.compress(model, optimizer, "gather(dense())")
    return [(str(each.message), each.filename) for each in found]


def test_a_gather_that_sends_more_than_dense_is_told_of_the_call(pool: Any) -> None:
    first, *others = pool.run(4, warnings_of_a_gather)
    ((message, file),) = first
    assert "gather(dense()) sends each message to all other ranks: among 4" in message
    assert file == __file__
    assert others == [[], [], []]
