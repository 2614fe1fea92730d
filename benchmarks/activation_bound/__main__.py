"""The error of COMET's weight gradients between two refreshes of its bounds, relative to its target.

    python -m benchmarks.activation_bound    writes benchmarks/activation_bound/results.json: two minutes

A ResNet-20 trains on CIFAR-10. In some steps after the refresh at step 100, the same batch also goes through
an uncompressed copy: sigma is the standard deviation of the difference of a layer's weight gradients, and the
target is share * mean |momentum| of that weight before the step. Needs LACONIC_DATA.
"""

from __future__ import annotations

import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.activations.__main__ import Batches, trainer
from benchmarks.common.machine import machine

RESULT = Path(__file__).with_name("results.json")
NET, BATCH, LR, SHARE = "resnet20", 32, 0.05, 0.01
PROBED = (105, 120, 140, 160, 180, 199)  # steps between the refreshes at 100 and 200
MODES = ("law", "paper")


def main() -> None:
    """Measure, and write the file."""
    torch.set_num_threads(1)
    rows = [{"mode": mode, "ratios": ratios(mode)} for mode in MODES]
    about = {"net": NET, "batch": BATCH, "lr": LR, "share": SHARE, "steps": PROBED, "machine": machine()}
    RESULT.write_text(json.dumps(about | {"rows": rows}) + "\n")
    for row in rows:
        print(row["mode"], f"median {statistics.median(row['ratios']):.2f}, most {max(row['ratios']):.2f}")


def ratios(mode: str) -> list[float]:
    """Sigma over the target, of each convolution and dense layer in each probed step."""
    batches = Batches(BATCH, seed=0)
    spec = f"comet(share={SHARE}, mode='{mode}', norms='exact')"
    model, optimizer, session = trainer(NET, spec, 0, LR)
    found: list[float] = []
    for step in range(PROBED[-1] + 1):
        x, y = batches.next()
        exact = gradients(copy.deepcopy(model), x, y) if step in PROBED else {}
        with session:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        for name, weight in model.named_parameters():
            if name in exact and weight.grad is not None:
                target = SHARE * float(optimizer.state[weight]["momentum_buffer"].abs().mean())
                found.append(round(float((weight.grad - exact[name]).std()) / target, 3))
        optimizer.step()
    return found


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """The gradients of all matrices."""
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.dim() > 1}


if __name__ == "__main__":
    main()
