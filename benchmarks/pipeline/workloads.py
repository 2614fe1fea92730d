"""What `benchmarks.pipeline` trains: the GPT of 10.8 million parameters, here or as if by faster workers.

Two cores compute a layer some thousand times slower than an accelerator, so that no link of 100 Mbit/s is
slow for them. Where workers are to be fast, a layer sleeps for as long as such a worker would compute, its
output is its input, and the gradients of its parameters are noise of the same size. Messages, coding and
updates are real.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.tools.tasks.shakespeare import GPT, LETTERS, Layer, cut_gpt
from laconic.tools.tasks.task import Recipe

WIDTH, DEPTH, HEADS, WINDOW = 384, 6, 6, 256
LAYER_S = 0.5e-3  # of forward, for a micro-batch of 4 windows: 3.8 GFLOP, so 7.6 TFLOP/s; backward twice that
MICRO = 4  # windows in a micro-batch


@dataclass(frozen=True)
class Workload:
    """`batch` windows a replica and step, in `micro_batches`."""

    about: str
    recipe: Recipe
    batch: int
    micro_batches: int


class Sleep(torch.autograd.Function):
    """A layer's time without its work."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        if x.device.type != "meta":
            time.sleep(LAYER_S)
        ctx.noise = [each.noise for each in weights]  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        time.sleep(2 * LAYER_S)
        return grad.clone(), *ctx.noise


class SleepingLayer(nn.Module):
    """A layer's parameters, and the time that a fast worker would take for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(WIDTH, HEADS)
        rng = torch.Generator().manual_seed(0)
        for weight in self.layer.parameters():
            weight.noise = 1e-4 * torch.randn(weight.shape, generator=rng)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Sleep.apply(x, *self.layer.parameters())
        return out


class First(nn.Module):
    """The first entries of each row, as logits: a head that takes no time."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :LETTERS]


def fast() -> GPT:
    """The GPT as if by fast workers: 10.7 million parameters."""
    model = GPT(WIDTH, DEPTH, HEADS, WINDOW)
    model.layers = nn.Sequential(*(SleepingLayer() for _ in range(DEPTH)))
    model.norm, model.head = nn.Identity(), First()  # type: ignore[assignment]
    return model


def cut_fast(model: nn.Module, stage: int, stages: int) -> nn.Module:
    """Its stages. Copies on the meta device keep no noise: they run no backward."""
    for weight in model.parameters():
        if not hasattr(weight, "noise"):
            weight.noise = None  # type: ignore[attr-defined]
    return cut_gpt(model, stage, stages)


WORKLOADS: Mapping[str, Workload] = {
    "fast": Workload(
        f"layers of {1e3 * LAYER_S:g} ms forward and {2e3 * LAYER_S:g} ms backward a micro-batch",
        Recipe(fast, lr=1e-3, cut=cut_fast),
        batch=32,
        micro_batches=8,
    ),
    "computed": Workload(
        "layers computed by this machine",
        Recipe(lambda: GPT(WIDTH, DEPTH, HEADS, WINDOW), lr=1e-3, cut=cut_gpt),
        batch=16,
        micro_batches=4,
    ),
}
DENSE = "dense()"  # torch's own stages
OURS = "direct(dense(), backward=dense())"  # the same floats by our stages, which post receives first
AC48 = "ac_sgd(forward=4, backward=8)"
CROSSINGS = {  # by the name that pages show
    "dense": DENSE,
    "dense, receives first": OURS,
    "fp16": "cast('fp16')",
    "direct 4/8": "direct(minmax(bits=4, block=128), minmax(bits=8, block=128))",
    "direct 2/6": "direct(minmax(bits=2, block=128), minmax(bits=6, block=128))",
    "AC-SGD 4/8": AC48,
    "AC-SGD 2/6": "ac_sgd(forward=2, backward=6)",
}
BETWEEN = {"dense()": "dense", "cgx(bits=4)": "cgx", "onebit_adam(warmup_steps=1)": "1-bit Adam"}
