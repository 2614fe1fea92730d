"""What the codes of `learned_code` keep, and how the residual grows: gradients of digits, at a fixed model.

    python -m benchmarks.learned_code    some minutes; writes nothing

WORKERS threads as ranks have 16 examples each a step. The model learns for 20 steps and then stays as it is,
which is the hardest for error feedback: the same gradient again and again. The net is trained for TRAIN
steps. A row is the mean over ranks and the 8 steps up to one: of the energy at the chosen entries, the share
that is sent (1: as they are); the norm of the residual, and that of `cltk`; bytes and milliseconds of a rank.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gradient import net
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.tools.tasks import find
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import Recipe, cross_entropy

WORKERS, STEPS, TRAIN, DENSITY = 4, 700, 300, 0.01
CODED = ("conv2.weight", "hidden.weight")  # neither the first nor the last layer
ROWS = (300, 316, 400, 500, 600, 700)


def gradients() -> tuple[Layout, list[Tensor]]:
    """The tensors' layout, and of each step float32 (WORKERS, n)."""
    torch.manual_seed(0)
    task, recipe = find("digits"), Recipe(net, lr=0.05)
    data, model = task.load(None), recipe.build()
    optimizer = recipe.optimizer(model)
    shards = [Shard(len(data["train_y"]), 16, rank=rank, size=WORKERS, seed=0) for rank in range(WORKERS)]
    coded = {name: part for name, part in model.named_parameters() if name in CODED}
    given = []
    for step in range(STEPS):
        rows = []
        for shard in shards:
            chosen = shard.indices(step)
            optimizer.zero_grad()
            output = model(task.inputs(data["train_x"][chosen], None))
            torch.autograd.backward(cross_entropy(output, data["train_y"][chosen]))
            rows.append(torch.cat([part.grad.flatten() for part in coded.values() if part.grad is not None]))
        given.append(torch.stack(rows))
        if step < 20:
            optimizer.step()
    return Layout.of((name, tuple(part.shape)) for name, part in coded.items()), given


def play(comm: Loopback, spec: str, layout: Layout, given: list[Tensor]) -> list[tuple[float, ...]]:
    """Of each step: share kept, norm of the residual, bytes, milliseconds."""
    meter = Metered(comm)
    bound = parse(spec).bind(layout, meter)
    figures: list[tuple[float, ...]] = []
    x, out = torch.zeros(layout.numel), torch.empty(layout.numel)
    for step, rows in enumerate(given):
        x += rows[comm.rank]
        before, sent_before, began = x.clone(), meter.snapshot().payload_sent, time.perf_counter()
        sent = bound.reduce(x, layout, Turn(step, comm.rank), out)
        seconds = time.perf_counter() - began
        assert sent is not None
        chosen = before - sent.clear_(before.clone())
        left = (chosen - sent.add_to_(torch.zeros(layout.numel))).square().sum()
        sent.subtract_from_(x)
        share = 1 - float(left / chosen.square().sum())
        nbytes = meter.snapshot().payload_sent - sent_before
        figures.append((share, float(x.norm()), float(nbytes), 1000 * seconds))
    return figures


def main() -> None:
    """Measure and show."""
    torch.set_num_threads(1)
    layout, given = gradients()
    specs = [f"learned_code({DENSITY}, until={TRAIN}, instance={i!r})" for i in ("ring", "server")]
    table = Table(title=f"{layout.numel:,} entries, {WORKERS} ranks")
    for column in ("spec", "step", "kept", "residual", "bytes", "ms"):
        table.add_column(column)
    for spec in (*specs, f"cltk({DENSITY})"):
        ranks = Loopback.run(WORKERS, lambda comm, spec=spec: play(comm, spec, layout, given), timeout_s=600)  # type: ignore[misc]
        figures = torch.tensor(ranks).mean(0)
        for row in ROWS:
            kept, residual, nbytes, ms = figures[row - 8 : row].mean(0).tolist()
            table.add_row(spec, str(row), f"{kept:.2f}", f"{residual:.1f}", f"{nbytes:.0f}", f"{ms:.0f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
