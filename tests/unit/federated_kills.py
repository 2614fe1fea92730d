"""Kills processes while they save a client's file, and prints how many states were saved in all.

python federated_kills.py FOLDER
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import torch

from laconic.federated.memory import InFile


def save_on(memory: InFile, first: int, saved: int) -> None:
    """Save one state after the other, each of one number, until killed; say so after the first."""
    for number in range(first, 1 << 30):
        memory.save({"number": number, "values": torch.full((50_000,), float(number))})
        if number == first:
            os.write(saved, b".")


def main(folder: str) -> None:
    rng, last = random.Random(0), 0
    for _ in range(15):
        memory = InFile(folder, "run", "a")
        hears, says = os.pipe()
        child = os.fork()
        if not child:
            save_on(memory, last + 1, says)
        os.close(says)
        assert os.read(hears, 1)
        os.close(hears)
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        state = memory.load()
        if state:
            assert state["number"] >= last, "what was saved is gone"
            assert bool((state["values"] == state["number"]).all()), "parts of two states"
            last = state["number"]
    print(last)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
