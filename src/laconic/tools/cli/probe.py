"""`laconic probe`: measures links, computing and codecs for `laconic plan`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from laconic.core import arguments
from laconic.core.units import format_count, format_rate, format_seconds
from laconic.tools.cli.console import console
from laconic.tools.cli.files import check_file, write
from laconic.tools.cli.run import run
from laconic.tools.cli.telling import Telling
from laconic.tools.plan import probe_script
from laconic.tools.plan.contenders import contenders
from laconic.tools.plan.probe import Probe
from laconic.tools.tasks import find
from laconic.tools.tasks.task import cross_entropy

GROUP = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def probe(
    task: Annotated[str, typer.Argument(help="measure with the model of this task")] = "digits",
    workers: Annotated[int, typer.Option(help="processes to start here, unless a launcher did")] = 2,
    model: Annotated[str | None, typer.Option(help="one of the task's models")] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", help="a method or strategy; may be repeated [default: common ones]"),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="folder of the data set [default: $LACONIC_DATA]")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="the file to write")] = Path("probe.json"),
    told_in: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure links, a training step and codecs here; on several machines with torchrun or `laconic lab`."""
    check_file(out)
    chosen = find(task)
    recipe = chosen.recipe(model)
    contenders(with_ or ())
    if not all(name in os.environ for name in GROUP):
        arguments.whole("--workers", workers, 2, 64)
        words = ["probe", task, "--out", str(out)]
        words += [word for spec in with_ or () for word in ("--with", spec)]
        words += ["--model", model] if model else []
        words += ["--data", str(data)] if data else []
        return _start(workers, words, out)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local > 1 or "OMP_NUM_THREADS" not in os.environ:  # lab hosts share the cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    dist.init_process_group("gloo")
    tensors = chosen.load(data)
    net = recipe.build()
    x, y = chosen.inputs(tensors["train_x"][: chosen.batch], None), tensors["train_y"][: chosen.batch]
    screen, doing = console(), [""]
    tell = doing.append if told_in is None else told_in.write_text
    with Telling(screen, lambda: doing[-1]):
        found = probe_script(
            net, recipe.optimizer(net), lambda: cross_entropy(net(x), y), with_ or (), told=tell
        )
    if dist.get_rank() == 0:
        write(out, found.json())
        if told_in is None:
            show(screen, found, out)
    dist.barrier()
    dist.destroy_process_group()
    return None


def _start(workers: int, words: list[str], out: Path) -> None:
    screen = console()
    with tempfile.TemporaryDirectory(prefix="laconic-") as scratch:
        told_in = Path(scratch) / "doing"
        told_in.write_text(f"starting {workers} workers")
        with Telling(screen, told_in.read_text):
            words += ["--told-in", str(told_in)]
            run(["--nproc-per-node", str(workers), "-m", "laconic.tools.cli", *words])
    show(screen, Probe.load(out), out)


def show(screen: Console, found: Probe, path: Path) -> None:
    links = Table(box=None, padding=(0, 1), header_style="bold")
    for head in ("ranks", "latency", "rate each way"):
        links.add_column(head, justify="right")
    for pair in found.pairs:
        rate = format_rate(8 * pair.bytes_a_second)
        links.add_row(f"{pair.first} and {pair.second}", format_seconds(pair.latency_s), rate)
    links.add_row(
        "all at once", format_seconds(found.network.latency_s), format_rate(8 * found.network.bytes_a_second)
    )
    screen.print(links)
    busy = found.network.busy
    screen.print(
        f"While workers compute, a message takes {format_seconds(busy.latency_s)}, and a megabyte costs"
        f" a worker {format_seconds(1e6 * busy.toll_s_a_byte)} of computing time."
    )
    work = found.work
    cut, cores = format_count(len(work.buckets), "bucket"), format_count(work.cores, "core")
    screen.print(
        f"A step: forward {format_seconds(work.forward_s)}, backward {format_seconds(work.backward_s)},"
        f" update {format_seconds(work.update_s)}; {cut}, {cores} per worker."
    )
    codecs = Table(box=None, padding=(0, 1), header_style="bold")
    for head in ("method", "MB a step", "encode", "decode"):
        codecs.add_column(head, justify="left" if head == "method" else "right")
    for each in found.methods:
        coding = format_seconds(each.encode_s.at(found.size)), format_seconds(each.decode_s.at(found.size))
        codecs.add_row(each.spec, f"{each.nbytes(found.size) / 1e6:.3g}", *coding)
    screen.print(codecs)
    screen.print(f"written to {path}; use it with laconic plan --probe {path}", style="dim")
