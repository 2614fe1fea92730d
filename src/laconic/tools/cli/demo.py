"""`laconic demo`: compares times to one accuracy over slow links, or over loopback without emulation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from laconic.tools.cli.console import console
from laconic.tools.cli.files import check_free
from laconic.tools.cli.lab import lab
from laconic.tools.lab import missing

WORKERS, LINK, TARGET = 4, "100mbit", 96
LIMIT_S = 1200.0
NAME = "demo"
TRAINING = (
    *("--model", "wide", "--batch", "32", "--lr", "0.1", "--eval-every", "5"),
    *("--against", "dense()", "--against", "fp16()", "--with", "auto()", "--with", "stc(density=0.01)"),
)


def demo(
    seeds: Annotated[int, typer.Option(help="trainings per method; each takes about three minutes")] = 1,
    steps: Annotated[int, typer.Option(help="per training")] = 80,
    out: Annotated[Path, typer.Option(help="folder for all runs")] = Path("runs"),
    loopback: Annotated[
        bool, typer.Option("--loopback", help="emulate no links, even where this machine can")
    ] = False,
) -> None:
    """Train on handwritten digits with four workers over emulated links of 100 Mbit/s, and compare times.

    Writes runs/demo/report.html, and replaces the last demo. The links are removed at the end.
    """
    check_free(out / NAME, overwrite=True, way_out="give another --out")
    words = ["train", "digits", "--workers", str(WORKERS), "--target", str(TARGET), "--seeds", str(seeds)]
    words += ["--steps", str(steps), *TRAINING, "--out", str(out), "--name", NAME, "--overwrite"]
    command = [sys.executable, "-m", "laconic.tools.cli", *words]
    screen = console()
    why = "asked for" if loopback else missing()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides c10d's warning about a name server
    if why is None:
        screen.print(f"{WORKERS} workers, each on a separate host with an emulated link of 100 Mbit/s")
        lab(command, hosts=WORKERS, link=LINK, once=True, timeout=LIMIT_S * seeds)
        return
    screen.print(
        f"No emulated links ({why}): workers use the loopback interface, as fast as memory. Each method's"
        " traffic and accuracy are real; speed cannot be compared.",
        style="yellow",
        markup=False,
    )
    sys.stdout.flush()
    os.execv(command[0], command)
