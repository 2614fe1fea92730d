"""A program that forks the ranks of a disturbed run, disturbs one of them, and reports how each rank ended.

`python -m benchmarks.faults.player PORT` reads one run per line, as JSON, and prints one line for each. PORT
is that of the ranks' store. torch is imported once, before the forks. Ranks end as scripts do, by Python's
own finalisation.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # as every optimiser does

from benchmarks.faults.ranks import take_part
from benchmarks.faults.schedule import BUSY, KILLED, PAUSED, STOPPED, Run

LIMIT_S = 150.0  # of a whole run, after which a rank counts as hung
NOTICED_S = 60.0  # until the others have noticed a stopped rank
BUSY_PROCESSES = 4
STACKS_S = 3.0  # for a hung rank to write its stacks


def play(run: Run, port: int, name: str, folder: Path) -> dict[str, Any] | None:
    """Play a run and return how its ranks ended, by rank; in a rank, return None after its training.

    "codes": exit codes, None after a hang. "results": what the ranks wrote, None without a file. "errors":
    end of stderr. "disturbed": whether the fault came during the training. "noticed": whether the other
    ranks noticed a stop.
    """
    board = memoryview(mmap.mmap(-1, 8 * (run.size + 1))).cast("d")
    ranks: dict[int, int] = {}
    for rank in range(run.size):
        if pid := os.fork():
            ranks[pid] = rank
            continue
        take_part(run, rank, port, name, board, folder)
        return None
    with _busy(BUSY_PROCESSES if run.fault == BUSY else 0):
        codes, disturbed, noticed = _disturb(run, ranks, board)
    return {
        "codes": [codes.get(rank) for rank in range(run.size)],
        "results": [_read(folder / f"{rank}.json") for rank in range(run.size)],
        "errors": [(folder / f"{rank}.err").read_text()[-6000:] for rank in range(run.size)],
        "disturbed": disturbed,
        "noticed": noticed,
    }


def _disturb(run: Run, ranks: dict[int, int], board: memoryview) -> tuple[dict[int, int], bool, bool]:
    """Disturb the victim, wait for all ranks, and kill those that hang.

    Returns exit codes by rank, whether the fault came in time, and whether other ranks noticed a stop.
    """
    living, codes = dict(ranks), {}
    signals, noticed = run.fault in (KILLED, STOPPED, PAUSED), False
    victim = next(pid for pid, rank in ranks.items() if rank == run.victim)
    deadline = time.monotonic() + LIMIT_S
    acted = wake = None
    while living and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[living.pop(pid)] = os.waitstatus_to_exitcode(status)
            continue
        time.sleep(0.005)
        now = time.monotonic()
        if victim not in living:
            continue
        if signals and acted is None and board[run.victim] >= run.at:
            os.kill(victim, signal.SIGKILL if run.fault == KILLED else signal.SIGSTOP)
            acted = now
        elif acted is not None and wake is None and run.fault != KILLED:
            noticed = bool(board[run.size])
            if noticed or run.fault == PAUSED or now > acted + NOTICED_S:
                wake = now + run.seconds
        elif wake is not None and now > wake:
            os.kill(victim, signal.SIGCONT)
            wake = float("inf")
    for pid in living:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR1)
    if living:
        time.sleep(STACKS_S)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes, acted is not None or not signals, noticed


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Run this number of computing processes."""
    pids: list[int] = []
    player = os.getpid()
    for _ in range(count):
        pid = os.fork()
        if not pid:
            while os.getppid() == player:
                sum(range(1_000_000))
            os._exit(0)
        pids.append(pid)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _read(file: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())
    return None


def main(port: int) -> None:
    """Play the runs of stdin. Return at its end, and in every rank after its training."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a rank then does not search imported objects
    for line in sys.stdin:
        request = json.loads(line)
        ended = play(Run(**request["run"]), port, request["name"], Path(request["folder"]))
        if ended is None:
            return
        print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
