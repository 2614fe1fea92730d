"""Sparse training of a recurrent net, and the operations of ResNet-50.

python -m benchmarks.rigl.recurrent           an LSTM on Shakespeare: dense, RigL and static masks
python -m benchmarks.rigl.recurrent tune      one seed at other learning rates, written nowhere
python -m benchmarks.rigl.recurrent flops     operations of ResNet-50, as a share of the dense net's
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.common.letters import BATCH, STEPS, train, train_all
from benchmarks.common.machine import machine
from benchmarks.rigl.__main__ import RUNS
from laconic.sparsity import SparseTraining, rigl, sparsify
from laconic.tools.tasks.shakespeare import WINDOW

SPECS = ("dense", "rigl(density=0.25, every=50)", "static_masks(density=0.25)")
LR = 0.04  # better than 0.01, 0.02 and 0.08 for each of them, at seed 0
SEEDS = (0, 1, 2)
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, blocks


def trained(spec: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the row of one training."""

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> SparseTraining | None:
        return None if spec == "dense" else sparsify(model, optimizer, spec, steps=steps)

    _, sparse, row = train(seed, LR, attach, steps)
    if sparse is not None:
        stats, flops = sparse.stats(), sparse.flops(torch.zeros(BATCH, WINDOW, dtype=torch.long))
        row |= {
            "density": stats.density,
            "model_density": stats.model_density,
            "forward_share": flops.forward / flops.dense_forward,
            "training_share": flops.training / flops.dense_training,
        }
    return {"spec": spec} | row | {"machine": machine()}


class Bottleneck(nn.Module):
    """A block of ResNet-50, halving the image in its 3 x 3 convolution."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.Conv2d(width, 4 * width, 1, bias=False),
        )
        same = channels == 4 * width
        self.skip = nn.Identity() if same else nn.Conv2d(channels, 4 * width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.body(x) + self.skip(x)
        return added


def resnet50() -> nn.Module:
    """The weights of ResNet-50, without norms and activation functions: they do not count."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, (width, blocks) in enumerate(STAGES):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def flops(quick: bool) -> None:
    """Count operations of ResNet-50 for one image, at the authors' densities and schedule."""
    rows = []
    for density in (0.2,) if quick else (0.2, 0.1):
        for layout in ("erk", "uniform"):
            model = resnet50()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found = rigl(model, optimizer, density, steps=32_000, layout=layout).flops(
                torch.zeros(1, 3, 224, 224)
            )
            rows.append(
                {
                    "layout": layout,
                    "density": density,
                    "dense_forward": found.dense_forward,
                    "forward_share": found.forward / found.dense_forward,
                    "training_share": found.training / found.dense_training,
                }
            )
            print(rows[-1], flush=True)
    if not quick:
        RUNS.put("flops", {"rows": rows})


def letters(quick: bool) -> None:
    """Run every training of the recurrent net that is not stored yet, one seed after the other."""
    seeds = SEEDS[:1] if quick else SEEDS
    train_all(RUNS, "letters/{spec}-seed{seed}", SPECS, seeds, trained, STEPS, quick=quick)
