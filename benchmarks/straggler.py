"""A host that falls asleep now and then, and how long the others need for their steps.

    sudo python -m benchmarks.straggler           8 hosts at 1 Gbit/s; benchmarks/results/straggler.json
    sudo python -m benchmarks.straggler --quick   4 hosts, a few steps, and writes nothing

Each rank is a process in a network namespace of its own, behind a link of this rate, and trains a model of 11
million parameters. The last host sleeps 300 ms before half of its steps, chosen at random. Told is the mean
over ranks of the seconds until each has done its steps, and of the slowest; without sleep beside it. Needs
root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine import machine
from benchmarks.wire import ROOT, missing, namespaces

RESULTS = Path(__file__).parent / "results" / "straggler.json"
DENSE = "dense()"
SPECS = (DENSE, "sgp()", "osgp(staleness=4)", "adpsgd()", "local_sgd(every=8)")
LINK = "1gbit"
SLEEP_S, SHARE = 0.3, 0.5
LIMIT_S = 600  # for one case


def main() -> None:
    """Measure, print a line a case, write the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.straggler")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    if reason := missing():
        print(f"skipped: {reason}")
        return
    size, steps, repeats = (4, 4, 1) if quick else (8, 30, 3)
    rows = []
    for spec in SPECS[:3] if quick else SPECS:
        for sleep_s in (0.0, SLEEP_S):
            case = {"spec": spec, "steps": steps, "sleep_s": sleep_s, "share": SHARE}
            told = [measure(size, case) for _ in range(repeats)]
            row = case | {key: statistics.median(each[key] for each in told) for key in told[0]}
            rows.append(row)
            print(
                f"{spec:20} asleep {sleep_s:.1f} s: {row['mean_s']:6.1f} s, the slowest"
                f" {row['slowest_s']:6.1f} s, {row['wire_mb']:8.0f} MB a host",
                flush=True,
            )
    if not quick:
        about = {"machine": machine(), "hosts": size, "link": LINK, "repeats": repeats}
        RESULTS.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def measure(size: int, case: dict[str, Any]) -> dict[str, float]:
    """One run of a case: seconds, over ranks, and megabytes that a rank has sent."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join((str(ROOT), *filter(None, sys.path))),
    }
    with namespaces(size, LINK) as names, TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.straggler_rank"]
        arguments = [str(size), f"file://{folder}/store", json.dumps(case)]
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command, str(rank), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        try:
            told = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    seconds = [each["steps_s"] for each in told]
    sent = statistics.mean(each["wire_mb"] for each in told)
    return {"mean_s": statistics.mean(seconds), "slowest_s": max(seconds), "wire_mb": sent}


if __name__ == "__main__":
    main()
