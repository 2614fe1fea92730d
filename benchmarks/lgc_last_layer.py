"""LGC's last layer, summed as it is or by its largest entries: accuracy on digits, and bytes, of three seeds.

    python -m benchmarks.lgc_last_layer    many minutes; writes nothing

WORKERS threads as ranks, each with 16 examples a step and its own copy of a small network (benchmarks/
gradient.py), train for STEPS steps, of which DENSE are summed as they are and TRAIN teach the net of codes.
Accuracy is that of all test images after the last step; loss is the mean of the last 50 steps. Bytes are a
rank's payload in the last step.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gradient import net
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.spec import parse
from laconic.ddp.handle import Handle
from laconic.exchange.method import lift
from laconic.tools.tasks import find
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import Recipe, cross_entropy

WORKERS, SEEDS, STEPS, DENSE, TRAIN, DENSITY = 4, 3, 300, 30, 100, 0.01
PHASES = f"dense_steps={DENSE}, train_steps={TRAIN}"
SPECS = ("sum()", *(f"lgc({DENSITY}, {PHASES}, last_layer={last!r})" for last in ("dense", "topk")))
MODELS: dict[tuple[int, int], torch.nn.Module] = {}  # of a seed and a rank


def play(comm: Loopback, spec: str, seed: int) -> tuple[float, float, float]:
    """Test accuracy in percent, mean loss of this rank at the end, bytes of the last step."""
    task, recipe = find("digits"), Recipe(net, lr=0.05)
    data, model = task.load(None), MODELS[seed, comm.rank]
    optimizer, meter = recipe.optimizer(model), Metered(comm)
    shard = Shard(len(data["train_y"]), 16, rank=comm.rank, size=WORKERS, seed=seed)
    parameters = {parameter: name for name, parameter in model.named_parameters()}
    handle = Handle(lift(parse(spec)), parameters, optimizer, meter, seed=seed)
    losses, nbytes = [], 0
    for step in range(STEPS):
        chosen = shard.indices(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(task.inputs(data["train_x"][chosen], None)), data["train_y"][chosen])
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        bucket = torch.cat(
            [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
        )
        before = meter.snapshot().payload_sent
        handle.exchange.begin()
        handle.exchange.mean_(bucket, handle.layout)
        handle.exchange.end()
        nbytes = meter.snapshot().payload_sent - before
        for parameter, view in zip(parameters, handle.layout.segments.views(bucket), strict=True):
            parameter.grad = view.view_as(parameter)
        optimizer.step()
    handle.remove()
    model.eval()
    with torch.no_grad():
        right = model(task.inputs(data["test_x"], None)).argmax(1) == data["test_y"]
    return 100 * float(right.float().mean()), sum(losses[-50:]) / 50, float(nbytes)


def spread(values: Tensor, digits: int) -> str:
    """Mean and standard deviation over seeds."""
    return f"{float(values.mean()):.{digits}f} ± {float(values.std()):.{digits}f}"


def main() -> None:
    """Train, and show."""
    torch.set_num_threads(1)
    table = Table(title=f"digits, {WORKERS} ranks, {STEPS} steps, {SEEDS} seeds")
    for column in ("spec", "accuracy, %", "loss", "bytes"):
        table.add_column(column)
    for spec in SPECS:
        found = []
        for seed in range(SEEDS):
            for rank in range(WORKERS):
                torch.manual_seed(seed)
                MODELS[seed, rank] = net()
            ranks = Loopback.run(WORKERS, lambda comm, s=spec, n=seed: play(comm, s, n), timeout_s=3600)  # type: ignore[misc]
            found.append(torch.tensor(ranks).mean(0))
        accuracy, loss, nbytes = torch.stack(found).T
        table.add_row(spec, spread(accuracy, 2), spread(loss, 4), f"{float(nbytes.mean()):,.0f}")
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
