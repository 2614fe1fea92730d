"""HSDP in real processes over gloo: exact shards within, a method between replicas."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.core.errors import AttachError, StateError
from laconic.core.spec import parse
from laconic.core.turn import Turn
from tests.dist.nets import GPT
from tests.dist.test_fsdp import LONG, loss_of, step_on, whole

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


def train(spec: str | None, parameters: str | None = None) -> tuple[list[float], Any, Tensor]:
    model, optimizer = replicated_gpt(2)
    handle = None if spec is None else laconic.compress(model, optimizer, spec, parameters=parameters)
    losses = [step_on(model, optimizer, step) for step in range(STEPS)]
    return losses, handle and handle.stats(), whole(model)


def test_replicas_train_to_the_dense_loss(pool: Any) -> None:
    """In few bits between replicas, and gathered in few bits within: the loss of plain HSDP, within 2 %."""
    dense = pool.run(4, train, None, timeout_s=LONG)[0][0]
    few = "error_fed(scatter_reduce(minmax(bits=4, block=64)))"
    for spec, parameters, smaller in (("cgx(bits=8)", None, 2), (few, "minmax(bits=8)", 3)):
        results = pool.run(4, train, spec, parameters, timeout_s=LONG)
        for losses, stats, weights in results:
            assert sum(dense[-10:]) < 0.7 * sum(dense[:10]), "it does learn"
            assert sum(losses[-10:]) == pytest.approx(sum(dense[-10:]), rel=0.02)
            assert losses != dense and stats.steps == STEPS and stats.ratio > smaller
            assert torch.equal(weights, results[0][2])


def first_gradients(spec: str, backwards: int) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of so many backward passes, put together from shards; and of the plain model, averaged."""
    model, optimizer = replicated_gpt(2)
    laconic.compress(model, optimizer, spec)
    torch.manual_seed(0)
    plain = GPT()
    for step in range(backwards):
        loss_of(model, step).backward()
        loss_of(plain, step).backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return [p.grad.full_tensor() for p in model.parameters()], [p.grad for p in plain.parameters()]


@pytest.mark.parametrize(("spec", "backwards"), [("sum()", 2), ("cgx(bits=8)", 1)])
def test_the_gradients_are_the_mean_of_all_ranks(pool: Any, spec: str, backwards: int) -> None:
    for got, plain in pool.run(4, first_gradients, spec, backwards, timeout_s=LONG):
        largest = max(float(part.abs().max()) for part in plain)
        for one, other in zip(got, plain, strict=True):
            assert (one - other).abs().max() <= (0.01 if "cgx" in spec else 1e-6) * largest


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


def accumulated(spec: str) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Gradients of three passes, of which the last exchanges; the plain model's; exchanges so far."""
    model, optimizer = replicated_gpt(2)
    handle = laconic.compress(model, optimizer, spec)
    torch.manual_seed(0)
    plain, exchanges = GPT(), []
    for step in range(3):
        model.set_requires_all_reduce(step == 2)
        loss_of(model, step).backward()
        loss_of(plain, step).backward()
        exchanges.append(handle.state_dict()["exchanges"])
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return [p.grad.full_tensor() for p in model.parameters()], [p.grad for p in plain.parameters()], exchanges


def test_machines_exchange_once_for_several_passes(pool: Any) -> None:
    """As fully_shard does after set_requires_all_reduce(False)."""
    for got, plain, exchanges in pool.run(4, accumulated, "sum()", timeout_s=LONG):
        assert exchanges == [0, 0, 1]
        largest = max(float(part.abs().max()) for part in plain)
        for one, other in zip(got, plain, strict=True):
            assert (one - other).abs().max() <= 1e-6 * largest


def by_hand() -> tuple[Tensor, Tensor]:
    """This rank's shard of one layer's gradient, and what the definition makes of the machines' means."""
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
    return model.weight.grad.to_local().flatten(), expected


def test_a_shard_is_the_mean_of_what_machines_send_of_it(pool: Any) -> None:
    for got, expected in pool.run(4, by_hand, timeout_s=LONG):
        assert ((got - expected).abs() > 1e-3).sum() <= 2  # an entry may round the other way


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


def stop_and_go() -> tuple[Tensor, Tensor, str]:
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
    return found[0], found[1], error_of(StateError, lambda: handle.load_state_dict({**state, "rank": 9}))


def error_of(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_a_resumed_run_ends_with_the_same_bits(pool: Any) -> None:
    for one, other, refused in pool.run(4, stop_and_go, timeout_s=LONG):
        assert torch.equal(one, other) and refused.startswith("the saved state is of rank 9")


def removed_and_refused() -> tuple[bool, list[str]]:
    plain = train(None)[2]
    model, optimizer = replicated_gpt(2)
    said = []
    for spec in ("dgc(density=0.01)", "onebit_adam(warmup_steps=3)"):
        said.append(error_of(AttachError, lambda spec=spec: laconic.compress(model, optimizer, spec)))
    mine = "cgx(bits=4)" if dist.get_rank() else "cgx(bits=5)"
    said.append(error_of(AttachError, lambda: laconic.compress(model, optimizer, mine)))
    for _ in range(2):  # dropped with its optimiser, without remove()
        optimizer = torch.optim.AdamW(model.parameters())
        handle = laconic.compress(model, optimizer, "cgx(bits=2)")
        step_on(model, optimizer, 0)
        kept = handle.stats().payload_sent
        del handle, optimizer
        gc.collect()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = laconic.compress(model, optimizer, "cgx(bits=2)")
    handle.remove()
    fresh, _ = replicated_gpt(2)
    model.load_state_dict(fresh.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        step_on(model, optimizer, step)
    assert kept and handle.stats().payload_sent == 0
    return torch.equal(plain, whole(model)), said


def test_removed_it_is_plain_hsdp_and_what_cannot_go_is_refused(pool: Any) -> None:
    for same, said in pool.run(4, removed_and_refused, timeout_s=LONG):
        assert same
        for message, part in zip(
            said, ("the optimiser steps", "the optimiser steps", "the spec differs"), strict=True
        ):
            assert part in message


class Partly(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def gradients_are_missing() -> str:
    model = Partly()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("machines", "shards")))
    laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), "cgx()")
    loss = model(torch.ones(3, 4)).sum()
    return error_of(AttachError, loss.backward)


def test_a_step_without_all_gradients_says_so(pool: Any) -> None:
    for said in pool.run(2, gradients_are_missing, timeout_s=LONG):
        assert said.startswith("the model has gradients for 20 of its 40 sharded elements in this step")


def thawed() -> str:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("machines", "shards")))
    model[1].weight.requires_grad_(False)
    laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk(density=0.1)")
    model(torch.ones(3, 8)).sum().backward()
    model[1].weight.requires_grad_(True)
    model[0].weight.requires_grad_(False)
    model.zero_grad()
    loss = model(torch.ones(3, 8)).sum()
    return error_of(AttachError, loss.backward)


def test_other_trained_parameters_than_at_the_start_are_refused(pool: Any) -> None:
    for said in pool.run(2, thawed, timeout_s=LONG):
        assert said.startswith("other parameters of the model are trained than when it was compressed")


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
