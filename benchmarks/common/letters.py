"""Training of a recurrent net on the letters of Shakespeare, for benchmarks of its layers.

The net is `laconic.tools.tasks.shakespeare.LSTM`, 128 wide. Adam; the rate rises and falls as in the recipes
of tasks, and gradients are clipped to a norm of 1. A run is a function of its seed: the first weights and the
batches are the same for all variants. One thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common.results import Results, Row
from laconic.tools.tasks.shakespeare import LSTM, load
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import Recipe

STEPS, BATCH = 1000, 16
Attach = Callable[[nn.Module, torch.optim.Optimizer], Any]


def train(seed: int, lr: float, attach: Attach, steps: int = STEPS) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Train once. Return the model, the result of `attach(model, optimizer)`, and a row of results."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, model, recipe = load(), LSTM(), Recipe(LSTM, lr)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    handle = attach(model, optimizer)
    shard = Shard(len(data["train_x"]), BATCH, 0, 1, seed)
    began = time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(lr, step, steps)
        chosen = shard.indices(step)
        optimizer.zero_grad()
        loss = cross_entropy(model, data["train_x"][chosen], data["train_y"][chosen])
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    seconds = time.process_time() - began
    with torch.no_grad():
        bits = float(cross_entropy(model.eval(), data["test_x"], data["test_y"])) / math.log(2)
    row = {"seed": seed, "steps": steps, "batch": BATCH, "lr": lr, "bits_per_letter": bits, "cpu_s": seconds}
    return model, handle, row


def train_all(
    runs: Results,
    key: str,
    specs: Iterable[str],
    seeds: Iterable[int],
    trained: Callable[[str, int, int], Row],
    steps: int,
    *,
    quick: bool,
) -> None:
    """Store the row `trained(spec, seed, steps)` of every run that has none yet.

    `key`: that of a row, such as "letters/{spec}-seed{seed}". `quick`: run 4 steps of each and store none.
    """
    for seed in seeds:
        for spec in specs:
            name = key.format(spec=spec, seed=seed)
            if quick or name not in runs:
                row = trained(spec, seed, 4 if quick else steps)
                print(spec, seed, row["bits_per_letter"], f"{row['cpu_s']:.0f} s", flush=True)
                if not quick:
                    runs.put(name, row)


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the letters y (n, t) after the letters x (n, t), in nats."""
    return F.cross_entropy(model(x.long()).flatten(0, 1), y.long().flatten())
