"""Parameters without a gradient under find_unused_parameters: unused, or taken away by the script."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.nets import agree
from tests.dist.pool import on_ranks
from tests.dist.runs import compressed


class Halves(nn.Module):
    """Two matrices, of which a pass uses those named; its gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(6, 5)), nn.Parameter(torch.zeros(4, 5))

    def forward(self, names: tuple[str, ...], x: Tensor) -> Tensor:
        return sum((self.get_parameter(name) * x[: len(self.get_parameter(name))]).sum() for name in names)


def inputs(step: int) -> list[Tensor]:
    """Of both ranks."""
    return [torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]


@on_ranks(2)
def test_nothing_is_lost_of_the_half_that_a_pass_leaves_out():
    """Two optimisers step by turns, as a GAN's: the most by which a step's sum of gradients is not kept."""
    spec = "topk(density=0.2)"
    model = DistributedDataParallel(Halves(), find_unused_parameters=True)
    parts = {name: parameter for name, parameter in model.module.named_parameters()}
    optimizers = {name: torch.optim.SGD([parameter], lr=1.0) for name, parameter in parts.items()}
    handle = laconic.compress(model, list(optimizers.values()), spec)
    given = {name: torch.zeros_like(parameter) for name, parameter in parts.items()}
    worst = 0.0
    for step in range(8):
        name = ["first", "second"][step % 2]
        optimizers[name].zero_grad()
        xs = inputs(step)
        model((name,), xs[dist.get_rank()]).backward()
        optimizers[name].step()
        given[name] += sum(xs)[: len(parts[name])] / 2
        held = handle.exchange.state_dict()[f"route0/residual/{name}"].clone()
        dist.all_reduce(held)
        worst = max(worst, float((held / 2 - parts[name].detach() - given[name]).abs().max()))
    assert agree(model) and worst < 1e-5


@pytest.mark.filterwarnings("ignore:.*changed")
@on_ranks(2, product(["dense()", "topk(density=0.2)"], [True, False]))
def test_a_gradient_that_the_script_takes_away_stays_away(spec, to_none):
    model, optimizer, _ = compressed(spec, Halves(), sgd={"lr": 1.0}, find_unused_parameters=True)
    kept = model.module.second
    for step in range(3):
        optimizer.zero_grad()
        model(("first", "second"), inputs(step)[dist.get_rank()]).backward()
        if to_none:
            kept.grad = None
        else:
            kept.grad.zero_()
        optimizer.step()
    assert bool(model.module.first.any()) and not bool(kept.any())


@on_ranks(2, ["topk(density=0.2)", "dgc(density=0.2)"])
def test_a_layer_that_is_frozen_before_compress_can_thaw(spec):
    model = DistributedDataParallel(Halves(), find_unused_parameters=True)
    kept = model.module.second.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    laconic.compress(model, optimizer, spec)
    moved = []
    for step in range(3):
        kept.requires_grad_(step == 2)
        optimizer.zero_grad()
        model(("first", "second"), inputs(step)[dist.get_rank()]).backward()
        optimizer.step()
        moved.append(bool(kept.any()))
    assert agree(model) and moved == [False, False, True]


@pytest.mark.filterwarnings("ignore:.*changed")
@on_ranks(2, ["dense()", "topk(density=0.2)"])
def test_clipping_covers_what_comes_late_for_an_unused_parameter(spec):
    model, optimizer, _ = compressed(spec, Halves(), sgd={"lr": 1.0}, find_unused_parameters=True)
    norms = []
    for step in range(4):
        before = torch.cat([each.detach().flatten().clone() for each in model.parameters()])
        optimizer.zero_grad()
        names = ("first", "second") if step == 0 else ("first",)
        (30 * model(names, inputs(step)[dist.get_rank()])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        after = torch.cat([each.detach().flatten() for each in model.parameters()])
        norms.append(float((after - before).norm()))
    assert agree(model)
    assert max(norms) < 0.1 + 1e-5


def resumed(at: int, in_place: bool) -> float:
    """How far two optimisers by turns, going on from a state, come from where they were without a stop."""

    def made() -> tuple[DistributedDataParallel, list[torch.optim.Optimizer], laconic.ddp.handle.Handle]:
        model = DistributedDataParallel(Halves(), find_unused_parameters=True)
        optimizers = [torch.optim.SGD([each], lr=1.0) for each in model.parameters()]
        return model, optimizers, laconic.compress(model, optimizers, "topk(density=0.2)")

    def train(run, steps):
        model, optimizers, _ = run
        for step in steps:
            turn = int(step % 4 != 0)  # the second half trains in three steps of four
            optimizers[turn].zero_grad()
            model((["first", "second"][turn],), inputs(step)[dist.get_rank()]).backward()
            optimizers[turn].step()

    run = made()
    train(run, range(at))
    kept = {name: each.clone() for name, each in run[0].state_dict().items()}, run[2].state_dict()
    train(run, range(at, 9))
    whole = torch.cat([each.detach().flatten().clone() for each in run[0].parameters()])
    again = run if in_place else made()
    again[0].load_state_dict(kept[0])
    again[2].load_state_dict(kept[1])
    train(again, range(at, 9))
    return float((torch.cat([each.detach().flatten() for each in again[0].parameters()]) - whole).abs().max())


@pytest.mark.parametrize("in_place", [False, True])
def test_what_waits_for_another_optimiser_is_in_the_state(pool, in_place):
    for at in (2, 3, 5):
        assert pool.run(2, resumed, at, in_place) == [0.0, 0.0]


@on_ranks(2)
def test_nothing_is_lost_where_passes_add_up():
    model, optimizer, handle = compressed(
        "topk(density=0.2)", Halves(), sgd={"lr": 1.0}, find_unused_parameters=True
    )
    second, given = model.module.second, torch.zeros(4, 5)
    worst = 0.0
    for step in range(6):
        optimizer.zero_grad()
        xs = inputs(step)
        for used_by in ((), (1,), (), (0, 1))[: 2 + step % 3] if step else ((0, 1),):
            mine = ("first", "second") if dist.get_rank() in used_by else ("first",)
            model(mine, xs[dist.get_rank()]).backward()
            given += sum((xs[rank][:4] for rank in used_by), torch.zeros(4, 5)) / 2
        optimizer.step()
        held = handle.exchange.state_dict()["route0/residual/second"].clone()
        dist.all_reduce(held)
        worst = max(worst, float((held / 2 - second.detach() - given).abs().max()))
    assert agree(model) and worst < 1e-5


@on_ranks(2)
def test_a_saved_state_stays_as_it_is():
    model = DistributedDataParallel(Halves(), find_unused_parameters=True)
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in model.parameters()]
    handle = laconic.compress(model, optimizers, "topk(density=0.2)")
    for step in range(3):
        model((["first", "second"][step % 2],), inputs(step)[dist.get_rank()]).backward()
        optimizers[step % 2].step()
    state = handle.state_dict()["tensors"]
    before = {name: each.clone() for name, each in state.items()}
    for each in optimizers:
        each.zero_grad()
        each.step()
        each.zero_grad(set_to_none=False)
    assert any("left/" in name for name in before)
    assert all(torch.equal(each, before[name]) for name, each in state.items())
