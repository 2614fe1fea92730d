"""One training in a lab of two regions, of which one may be cut off for a while, or of one region."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from benchmarks.wan.figures import Record, Times
from laconic.core.errors import LabError
from laconic.tools.lab import Lab, Link
from laconic.tools.lab.wiring import INTERFACE

ROOT = Path(__file__).parents[2]
REGIONS, IN_REGION = 2, 2
LIMIT_S = 1800.0


def train(
    link: Link, words: list[str], cut_s: float | None, folder: Path, regions: int = REGIONS
) -> tuple[list[Record], Times | None]:
    """Train with these arguments of a rank; the second region has no link for `cut_s` seconds.

    Returns the records of the ranks that have ended, and when the link was down.

    Raises:
        LabError: A rank has failed, or rank 0 has no record in time.
    """
    command = [sys.executable, "-m", "benchmarks.wan.rank", str(folder), *words]
    if cut_s is not None:
        (folder / "cut").touch()
    cut, ranks = None, regions * IN_REGION
    with Lab(regions, link) as lab, ExitStack() as ends:
        outputs = [ends.enter_context((folder / f"errors{rank}").open("w")) for rank in range(ranks)]
        jobs = [start(lab, rank, ranks, command, output) for rank, output in enumerate(outputs)]
        ends.callback(end_all, jobs)
        limit = time.monotonic() + LIMIT_S
        if cut_s is not None:
            wait(jobs, folder, limit, [f"begun{rank}" for rank in range(ranks)])
            down = switch(lab, "down")
            time.sleep(cut_s)
            cut = down, switch(lab, "up")
            (folder / "up").touch()
        wait(jobs, folder, limit, ["record0.json"])
        jobs[0].wait(timeout=LIMIT_S)
    found = (folder / f"record{rank}.json" for rank in range(ranks))
    return [json.loads(each.read_text()) for each in found if each.exists()], cut


def start(lab: Lab, rank: int, ranks: int, command: list[str], output: IO[str]) -> subprocess.Popen[str]:
    """Start a rank on the host of its region."""
    host, local = divmod(rank, IN_REGION)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": IN_REGION,
        "OMP_NUM_THREADS": 1,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    environment = lab.place(host) | {name: str(value) for name, value in numbers.items()}
    job: subprocess.Popen[str] = lab.start(host, command, env=environment, cwd=ROOT, stderr=output, text=True)
    return job


def wait(jobs: list[subprocess.Popen[str]], folder: Path, limit: float, names: list[str]) -> None:
    """Wait for these files. Raises `LabError` if a rank fails, rank 0 ends, or it takes too long."""
    while not all((folder / name).exists() for name in names):
        codes = [job.poll() for job in jobs]
        if any(codes) or codes[0] == 0 or time.monotonic() > limit:
            errors = "\n".join((folder / f"errors{rank}").read_text()[-2000:] for rank in range(len(jobs)))
            raise LabError(f"exit codes {codes}, and no {', '.join(names)}:\n{errors}")
        time.sleep(0.1)


def switch(lab: Lab, state: str) -> float:
    """Set the second region's link up or down; return when."""
    if lab.start(1, ["ip", "link", "set", INTERFACE, state]).wait(timeout=20):
        raise LabError(f"the link does not go {state}")
    return time.time()


def end_all(jobs: list[subprocess.Popen[str]]) -> None:
    """Kill the ranks that are left."""
    for job in jobs:
        job.kill()
        job.wait()
