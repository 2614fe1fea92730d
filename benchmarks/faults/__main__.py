"""A campaign of disturbed runs over the whole registry.

    python -m benchmarks.faults --minutes 20              missing runs, for 20 minutes
    python -m benchmarks.faults --only "full disk"        runs of one fault
    python -m benchmarks.faults --match "sgp()" --again   runs of some specs, again

Ranks are processes on this machine, over gloo. `schedule` lists the faults, `verdicts` the checks. Needs
Linux; "full disk" and "link down" need root. Results by <fault>/<spec>-<number> are in
benchmarks/faults/results.jsonl; `make docs` writes the table of docs/faults.md from them. The exit status is
1 if a run of this call failed a check.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from benchmarks.common.machine import machine
from benchmarks.common.results import Row
from benchmarks.faults import commands, verdicts
from benchmarks.faults.ranks import MOST_STEPS, STEPS
from benchmarks.faults.schedule import RUNS, Run, runs

TRIES = 3  # of a run whose training is over before its fault
MACHINE = "machine"  # key of the machine of the last runs


class Players:
    """One player for each thread, the store of their ranks, and the models of undisturbed runs."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._here = threading.local()
        self._numbers = itertools.count()
        self._clean: dict[str, str] = {}
        self._all: list[subprocess.Popen[str]] = []

    def play(self, run: Run) -> dict[str, Any]:
        """Play a run; return how its ranks ended, as in `player.play`."""
        player = getattr(self._here, "player", None)
        if player is None:
            command = (sys.executable, "-m", "benchmarks.faults.player", str(self._store.port))
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            player = self._here.player = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._all.append(player)
        with tempfile.TemporaryDirectory() as folder:
            request = {"run": asdict(run), "name": f"run{next(self._numbers)}", "folder": folder}
            print(json.dumps(request), file=player.stdin, flush=True)
            ended: dict[str, Any] = json.loads(player.stdout.readline())
            return ended

    def clean(self, run: Run) -> str:
        """Return the fingerprint of the model after an undisturbed run, where a check needs it."""
        if not verdicts.compares_bits(run):
            return ""
        if run.spec not in self._clean:
            ended = self.play(Run("nothing", run.spec, 0, run.size, 0, 0, 0.0))
            models = {result and result["model"] for result in ended["results"]}
            assert ended["codes"] == [0] * run.size and len(models) == 1, ended
            self._clean[run.spec] = models.pop()
        return self._clean[run.spec]

    def close(self) -> None:
        """End all players."""
        for player in self._all:
            player.communicate()


def disturb(run: Run, players: Players) -> Row:
    """Do one run. Return its row: failed checks, and the errors of the ranks if there are any.

    Raises `NotDisturbedError` if the fault came too late in each of `TRIES` tries.
    """
    for last in (*[False] * (TRIES - 1), True):
        began, errors = time.monotonic(), list[str]()
        try:
            if run.fault in commands.BY_FAULT:
                wrong = commands.failed_checks(run)
            else:
                ended = players.play(run)
                wrong = verdicts.failed_checks(run, ended, players.clean(run), STEPS, MOST_STEPS)
                errors = ended["errors"]
            break
        except verdicts.NotDisturbedError:
            if last:
                raise
    row = asdict(run) | {"wrong": wrong, "took_s": round(time.monotonic() - began, 1)}
    return row | ({"errors": errors} if wrong else {})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="begin no run after so many minutes")
    parser.add_argument("--lanes", type=int, default=4, help="runs at the same time")
    parser.add_argument("--only", help="the one fault", metavar="FAULT")
    parser.add_argument("--match", default="", help="a part of the specs", metavar="TEXT")
    parser.add_argument("--again", action="store_true", help="run those that are done too")
    options = parser.parse_args()
    chosen = [run for run in runs() if options.only in (None, run.fault) and options.match in run.spec]
    due = [run for run in chosen if options.again or run.key not in RUNS]
    deadline = time.monotonic() + 60 * options.minutes
    players = Players()

    def one(run: Run) -> bool:
        """Do a run and store it. Return whether it failed a check."""
        if time.monotonic() > deadline:
            return False
        try:
            row = disturb(run, players)
        except verdicts.NotDisturbedError:
            print(f"{run.fault:24} {run.spec}: over before the fault", flush=True)
            return False
        RUNS.put(run.key, row)
        found = row["wrong"] or "passed"
        print(f"{run.fault:24} {run.spec:50} {row['took_s']:6.1f} s  {found}", flush=True)
        return bool(row["wrong"])

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # folders and disks are removed
    RUNS.put(MACHINE, machine())
    with ThreadPoolExecutor(options.lanes) as lanes:
        try:
            wrong = sum(lanes.map(one, due))
        finally:
            deadline = 0.0  # begin no other run
    players.close()
    done = sum(run.key in RUNS for run in chosen)
    print(f"{done} of {len(chosen)} runs are done; {wrong} of this call failed a check")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
