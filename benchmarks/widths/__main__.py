"""How to choose the widths of `adaptive_bits`: dynamic programming, or clusters by size and norm.

    LACONIC_DATA=FOLDER python -m benchmarks.widths    writes benchmarks/widths/results.json

Two gradients: the stored one, and that of the Shakespeare task's GPT after 100 steps of 16 windows. Matrices
of 1024 elements and more, as `cgx` uses them. The figure is the share of bytes saved compared with 4 bits for
all, at no larger error, measured on encoded data.

Clusters are those of k-means on the logarithms of size and typical entry, ordered by typical entry, with
widths that rise in that order: of all such, the ones that are shortest within the error allowed. So k-means
is given the measured errors too, for which there is no rule in what is recalled of the paper.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from itertools import combinations_with_replacement
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.machine import machine
from benchmarks.common.timing import Row, save, show
from benchmarks.gradient import stored
from laconic.codecs.minmax import MinMax
from laconic.reducers.scatter_reduce.adaptive_bits import CHOICE
from laconic.reducers.scatter_reduce.widths import cheapest
from laconic.tools.tasks import find
from laconic.tools.tasks.shakespeare import GPT
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import cross_entropy

RESULT = Path(__file__).with_name("results.json")
STEPS, BATCH, BITS = 100, 16, 4
CLUSTERS = (2, 3, 4, 5)


def of_gpt() -> dict[str, Tensor]:
    """The gradient of a small language model, early in its training."""
    torch.manual_seed(0)
    task, model = find("shakespeare"), GPT()
    data = task.load(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shard = Shard(len(data["train_y"]), BATCH, rank=0, size=1, seed=0)
    for step in range(STEPS + 1):
        chosen = shard.indices(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(task.inputs(data["train_x"][chosen], None)), data["train_y"][chosen])
        torch.autograd.backward(loss)
        if step < STEPS:
            optimizer.step()
    return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


def errors_of(x: Tensor) -> list[float]:
    """|C(x) - x|^2 at each width."""
    lost = (MinMax(bits).decode_add_(MinMax(bits).encode(x), x.clone(), -1.0) for bits in CHOICE)
    return [float(each.double().square().sum()) for each in lost]


def clusters(x: Tensor, count: int) -> list[int]:
    """k-means on standardised rows (n, 2), from evenly spaced rows on: the cluster of each."""
    centres = x[torch.linspace(0, len(x) - 1, count).round().long()]
    for _ in range(50):
        home = torch.cdist(x, centres).argmin(dim=1)
        centres = torch.stack(
            [x[home == i].mean(dim=0) if bool((home == i).any()) else centres[i] for i in range(count)]
        )
    return home.tolist()


def by_clusters(
    tensors: list[Tensor], costs: list[list[int]], errors: list[list[float]], allowed: float, count: int
) -> list[int]:
    """The shortest widths that rise with the clusters' typical entries."""
    size = torch.tensor([float(x.numel()) for x in tensors]).log()
    typical = torch.stack([x.norm() for x in tensors]).log() - size / 2
    rows = torch.stack([size, typical], dim=1)
    home = clusters((rows - rows.mean(dim=0)) / rows.std(dim=0).clamp(min=1e-6), count)
    order = sorted(set(home), key=lambda i: float(typical[[at == i for at in home]].mean()))
    best, least = [CHOICE.index(BITS)] * len(tensors), math.inf
    for widths in combinations_with_replacement(range(len(CHOICE)), len(order)):
        options = [widths[order.index(i)] for i in home]
        cost = sum(row[i] for row, i in zip(costs, options, strict=True))
        if cost < least and sum(row[i] for row, i in zip(errors, options, strict=True)) <= allowed:
            best, least = options, cost
    return best


def measure(name: str, gradient: Mapping[str, Tensor]) -> list[Row]:
    """What each way of choosing saves of one gradient."""
    tensors = [x.flatten().contiguous() for x in gradient.values() if x.dim() > 1 and x.numel() >= 1024]
    uniform = CHOICE.index(BITS)
    costs = [[MinMax(bits).nbytes(x.numel()) for bits in CHOICE] for x in tensors]
    errors = [errors_of(x) for x in tensors]
    allowed = math.fsum(row[uniform] for row in errors)
    dynamic = cheapest(costs, errors, allowed)
    assert dynamic is not None
    ways = {"dynamic programming": dynamic}
    for count in CLUSTERS:
        if count <= len(tensors):
            ways[f"k-means, {count} clusters"] = by_clusters(tensors, costs, errors, allowed, count)
    rows: list[Row] = []
    usual = sum(row[uniform] for row in costs)
    for way, options in ways.items():
        cost = sum(row[i] for row, i in zip(costs, options, strict=True))
        error = math.fsum(row[i] for row, i in zip(errors, options, strict=True)) / allowed
        widths = sorted({CHOICE[i] for i in options})
        detail = f"{cost:,} of {usual:,} bytes, {error:.3f} of the error, widths {widths[0]} to {widths[-1]}"
        bar = -10.0 if way == "dynamic programming" else None
        rows.append(
            (f"{name}, {len(tensors)} tensors: {way}", "% fewer bytes", 100 * (1 - cost / usual), bar, detail)
        )
    return rows


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    rows = [*measure("stored gradient", stored()), *measure("GPT", of_gpt())]
    show("widths of 2 to 8 bits, against 4 for all", rows)
    save(RESULT, dict(machine()), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
