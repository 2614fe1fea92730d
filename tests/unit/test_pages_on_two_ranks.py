"""Python of README, and of pages that need several ranks, runs on two over gloo."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.dist.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LONG = 300.0  # the first import of DistributedDataParallel takes each worker seconds


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def readme() -> list[list[float]]:
    """Runs each block of README by itself; returns the weights that every block leaves."""
    left = []
    for nth, block in enumerate(CODE.findall((ROOT / "README.md").read_text("utf-8"))):
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(net())
        stage: dict[str, Any] = {
            **{"torch": torch, "laconic": laconic, "DistributedDataParallel": DistributedDataParallel},
            **{"Net": net, "model": model, "scaler": None, "accuracy": lambda model: 0.5},
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        }
        stage["loop"] = lambda stage=stage: steps(stage["model"], stage["optimizer"])
        exec(compile(block.replace("...  # the loop", "loop()  # the loop"), f"block {nth}", "exec"), stage)
        if "# the loop" not in block:
            stage["loop"]()
        left.append(torch.cat([each.detach().flatten() for each in stage["model"].parameters()]).tolist())
    return left


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Three steps of training."""
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 8)), torch.arange(4)).backward()
        optimizer.step()


def test_readme_runs_and_its_ranks_end_alike(pool: Pool) -> None:
    first, second = pool.run(2, readme, timeout_s=LONG)
    assert len(first) == 3 and first == second


class Blocks(nn.Module):
    """A model as torchtitan has them: its blocks are a dictionary of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(64, 64) for i in range(3)})
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + layer(x).relu()
        return self.norm(x)  # type: ignore[no-any-return]


class Container(torch.optim.Optimizer):
    """Steps other optimisers, as torchtitan's OptimizersContainer does."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [each for each in model.parameters() if each.dim() == 2]
        vectors = [each for each in model.parameters() if each.dim() != 2]
        self.optimizers = [torch.optim.AdamW(each, lr=0.01) for each in (matrices, vectors)]
        super().__init__([*matrices, *vectors], {})

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)


class Dims:
    """The part of torchtitan's ParallelDims that is asked."""

    def get_mesh(self, name: str) -> Any:
        assert name == "fsdp"
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def replicated() -> str:
    """What is said where the mesh has replicas of shards."""
    stage: dict[str, Any] = {"__name__": "a page"}
    (block,) = CODE.findall((ROOT / "docs" / "torchtitan.md").read_text("utf-8"))
    exec(compile(block, "torchtitan.md", "exec", dont_inherit=True), stage)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "fsdp"))
    model = stage["parallelize"](Blocks(), parallel_dims=SimpleNamespace(get_mesh=lambda name: mesh))
    with pytest.raises(AttachError) as refused:
        stage["compress_shards"](Container(model), [model], None)
    return str(refused.value)


def titan(compressed: bool) -> tuple[list[float], list[list[float]], Any]:
    """The trainer's calls: losses, the gradients of the first step as this rank's shards, and the figures."""
    stage: dict[str, Any] = {"__name__": "a page"}
    (block,) = CODE.findall((ROOT / "docs" / "torchtitan.md").read_text("utf-8"))
    exec(compile(block, "torchtitan.md", "exec", dont_inherit=True), stage)
    torch.manual_seed(0)
    model = stage["parallelize"](Blocks(), parallel_dims=Dims(), training=None)
    optimizers = Container(model)
    if compressed:
        stage["compress_shards"](optimizers, [model], Dims())
    else:  # gloo has no sum with a factor
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    losses, gradients = [], []
    torch.manual_seed(dist.get_rank())
    for step in range(10):
        x = torch.randn(32, 64)
        optimizers.zero_grad()
        loss = F.mse_loss(model(x), x.roll(1, dims=1), reduction="sum") / (
            64 * 64
        )  # by the tokens of all ranks
        loss.backward()
        if step == 0:
            gradients = [each.grad.to_local().flatten().tolist() for each in model.parameters()]
        optimizers.step()
        losses.append(loss.item())
    return losses, gradients, stage["handles"][0].stats() if compressed else None


def test_torchtitans_place_for_the_line_compresses_and_trains(pool: Pool) -> None:
    """Gradients within a fifth, as weights are in 8 bits too: a wrong factor of the sum would be a half."""
    plain, coded = pool.run(2, titan, False, timeout_s=LONG), pool.run(2, titan, True, timeout_s=LONG)
    for (losses, gradients, _), (own, coded_gradients, stats) in zip(plain, coded, strict=True):
        for exact, found in zip(gradients, coded_gradients, strict=True):
            norm = torch.tensor(exact).norm().item()
            assert torch.dist(torch.tensor(exact), torch.tensor(found)).item() <= 0.2 * norm
        assert own[-1] < 0.9 * own[0] and own == pytest.approx(losses, rel=0.02)
        assert stats.steps == 10 and stats.ratio > 2


def test_replicas_of_torchtitans_shards_are_refused(pool: Pool) -> None:
    for said in pool.run(2, replicated, timeout_s=LONG):
        assert "divides gradients by 1.0, but replicas exchange means" in said
