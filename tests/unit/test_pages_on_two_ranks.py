"""Python of README and of pages that needs several ranks runs on two, over gloo."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.dist.pool import Pool
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import laconic

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
        if "loop()" not in block:
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
