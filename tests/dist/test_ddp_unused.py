"""Parameters without a gradient under find_unused_parameters: unused, or taken away by the script."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.nets import agree


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


def by_turns(spec: str) -> float:
    """Two optimisers step by turns, as a GAN's: the most by which a step's sum of gradients is not kept."""
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
    assert agree(model)
    return worst


def test_nothing_is_lost_of_the_half_that_a_pass_leaves_out(pool):
    for worst in pool.run(2, by_turns, "topk(density=0.2)"):
        assert worst < 1e-5


def taken_away(spec: str, to_none: bool) -> bool:
    """Whether a layer stands still whose gradient the script takes away."""
    model = DistributedDataParallel(Halves(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    laconic.compress(model, optimizer, spec)
    kept = model.module.second
    for step in range(3):
        optimizer.zero_grad()
        model(("first", "second"), inputs(step)[dist.get_rank()]).backward()
        if to_none:
            kept.grad = None
        else:
            kept.grad.zero_()
        optimizer.step()
    assert bool(model.module.first.any())
    return not bool(kept.any())


@pytest.mark.filterwarnings("ignore:.*changed")
@pytest.mark.parametrize("spec", ["dense()", "topk(density=0.2)"])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_the_script_takes_away_stays_away(pool, spec, to_none):
    assert pool.run(2, taken_away, spec, to_none) == [True, True]


def thawed(spec: str) -> bool:
    """A layer is frozen between DistributedDataParallel and compress, and trains later."""
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
    return agree(model) and moved == [False, False, True]


@pytest.mark.parametrize("spec", ["topk(density=0.2)", "dgc(density=0.2)"])
def test_a_layer_that_is_frozen_before_compress_can_thaw(pool, spec):
    assert pool.run(2, thawed, spec) == [True, True]
