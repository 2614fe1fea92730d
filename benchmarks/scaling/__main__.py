"""The cost of a step as workers are added: bytes per worker and step, and time to select, for 1 to 64.

    python -m benchmarks.scaling            writes benchmarks/scaling/results.json: some minutes
    python -m benchmarks.scaling --quick    1 and 4 workers, fewer steps; writes nothing

Bytes: ranks are threads of one process (`Loopback`), and up to 8 are processes on gloo too, which must count
the same. Sent and received are what messages hold; with headers they are larger by a packet's 66 bytes and
more a message (`laconic.comm.wire_model`), which small messages to many ranks are mostly made of.

Seconds: one worker's part of choosing what to send, on a model of ResNet-50's 25.6 M entries, one thread; of
CGX, which chooses nothing, to encode its message. `selecting.py` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.machine import machine
from benchmarks.scaling.rank import MODEL, one_process, play
from benchmarks.scaling.selecting import seconds_to_select
from laconic.comm.loopback import Loopback

RESULT = Path(__file__).with_name("results.json")
DENSITY = 0.01
SIZES = (1, 2, 4, 8, 16, 32, 64)
PROCESSES = (2, 4, 8)
FIRST, STEPS = 12, 4  # steps that are not counted, in which MiCRO's threshold settles; and that are
DENSE_SIZES = (1, 2, 4, 8, 16)  # what more threads than these add up is only time
SPECS = {
    "dense()": "dense",
    f"topk(density={DENSITY})": "gather",
    f"deft(density={DENSITY})": "DEFT",
    f"micro(density={DENSITY})": "MiCRO",
    f"oktopk(density={DENSITY})": "Ok-Topk",
    "cgx(bits=4)": "CGX, 4 bits",
}
FEW, MANY = 4, 64  # workers: what traffic is compared between
MOST, LEAST = 1.4, 8  # bars: growth of traffic from FEW to MANY; how much less DEFT selects at 16 than alone
Row = dict[str, Any]


def threads(spec: str, size: int, first: int, steps: int) -> Row:
    """The costliest of `size` ranks that are threads."""
    return worst(Loopback.run(size, lambda comm: play(spec, comm, first, steps), timeout_s=600.0))


def processes(spec: str, size: int, first: int, steps: int) -> Row:
    """The costliest of `size` ranks that are processes on gloo."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with context.Pool(size) as pool:
        jobs = [(spec, rank, size, store.port, first, steps) for rank in range(size)]
        return worst(pool.starmap(one_process, jobs, chunksize=1))


def worst(ranks: list[dict[str, float]]) -> Row:
    """The largest of each figure over ranks."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def measure(quick: bool) -> list[Row]:
    """A row for each method and number of workers, printed as they come."""
    first, steps = (1, 2) if quick else (FIRST, STEPS)
    rows: list[Row] = []
    for spec, name in SPECS.items():
        for size in (1, 4) if quick else DENSE_SIZES if spec == "dense()" else SIZES:
            row: Row = {"spec": spec, "name": name, "workers": size} | threads(spec, size, first, steps)
            if size in PROCESSES and not quick:
                real = processes(spec, size, first, steps)
                row |= {"process_sent": real["sent"], "process_s": real["seconds"]}
            rows.append(row)
            print(
                f"{spec} on {size}: {row['sent'] / 1e3:,.1f} kB sent, {row['received'] / 1e3:,.1f} received,"
                f" {100 * row['realised']:.3f} % changed",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.scaling")
    parser.add_argument("--quick", action="store_true", help="1 and 4 workers; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows = measure(quick)
    times = seconds_to_select((1, 4) if quick else SIZES, DENSITY, rounds=3 if quick else 9)
    for row in times:
        print(f"{row['name']} on {row['workers']}: {1e3 * row['seconds']:.2f} ms to select", flush=True)
    if not quick:
        about = {
            "machine": machine(),
            "entries": MODEL.numel,
            "density": DENSITY,
            "steps": STEPS,
            "first": FIRST,
        }
        RESULT.write_text(json.dumps(about | {"traffic": rows, "selecting": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
