"""What a rank sends through servers as ranks are added: `stc` and `dgc` with `down=`, by a model's size.

    python -m benchmarks.through_servers            some minutes; writes through_servers/results.json
    python -m benchmarks.through_servers --quick    the smallest model; writes nothing

A tensor is cut in pieces, and each piece has a header of its own, so a small model among many ranks sends
more headers than entries. All messages of one step are encoded here, of every rank to every other, in one
process: 64 ranks with a gradient and memories of 25.6 M entries each would not fit. Memories are empty.
`tests/unit/test_through_servers.py` compares it with an exchange among threads.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.machine import machine
from benchmarks.common.resnet50 import SIZES
from laconic.comm.messages import SentMessage, add_messages_, encoded
from laconic.comm.wire_model import all_reduce_bytes
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.exchange.method import lift
from laconic.reducers.server import Server
from laconic.reducers.server.deal import deal, homes

RESULT = Path(__file__).with_name("results.json")
SPECS = ("stc(density=0.0025, down=0.0025)", "dgc(density=0.001, down=0.001)")  # densities by default
ENTRIES = (400_000, 1_000_000, 2_000_000, 4_000_000, sum(SIZES))
WORKERS = (4, 16, 64)
LATE = 1_000_000  # a step after every warm-up
SQUARES = 4


def layouts(entries: int) -> dict[str, Layout]:
    """Models of about so many entries, by name: a few large matrices, and tensors as ResNet-50 has them."""
    side, share = round((entries / SQUARES) ** 0.5), entries / sum(SIZES)
    squares = Layout.of((f"square{i}", (side, side)) for i in range(SQUARES))
    resnet = Layout.of((f"layer{i}", (1, max(1, round(share * size)))) for i, size in enumerate(SIZES))
    return {f"{SQUARES} square matrices": squares, "ResNet-50's tensors": resnet}


def sent(spec: str, layout: Layout, noise: Tensor, size: int) -> int:
    """Bytes that the busiest of `size` ranks puts on the wire in a step, without packet headers.

    Args:
        spec: A method that sends through servers.
        layout: The model, which is one bucket.
        noise: Float32 (n + 1000 (size - 1),), of which each rank's gradient is a window.
        size: Number of ranks.
    """
    server = next(route.reducer for route in lift(spec).routes if isinstance(route.reducer, Server))
    up, down = server.up.at(LATE), server.down.at(LATE)
    parts = deal(layout, homes(layout, size), 0, size).parts
    nbytes, mean = [0] * size, torch.zeros(layout.numel)
    for rank in range(size):
        x = noise[1000 * rank :][: layout.numel]
        for home, part in enumerate(parts):
            message = encoded(x, part, up, Turn(LATE, rank, 0))
            nbytes[rank] += message.numel() * (home != rank)
            if part.numel:
                add_messages_(mean, [(rank, SentMessage(up, message, part.segments))], 1 / size)
    for home, part in enumerate(parts):
        nbytes[home] += (size - 1) * encoded(mean, part, down, Turn(LATE, home, 1)).numel()
    return max(nbytes)


def noise_of(layout: Layout, size: int) -> Tensor:
    """Cubes of normal numbers, for `sent`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(layout.numel + 1000 * (size - 1), generator=generator) ** 3


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """A row for each model, method and number of workers, printed as they come."""
    found = []
    for entries in ENTRIES[:1] if quick else ENTRIES:
        for name, layout in layouts(entries).items():
            noise = noise_of(layout, max(WORKERS))
            for spec in SPECS:
                for size in WORKERS:
                    began = time.perf_counter()
                    row = {"entries": entries, "model": name, "spec": spec, "workers": size}
                    row |= {"sent": sent(spec, layout, noise, size)}
                    row |= {"dense": all_reduce_bytes(4 * layout.numel, size)}
                    found.append(row)
                    print(row, f"{time.perf_counter() - began:.1f} s", flush=True)
    return found


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.through_servers")
    parser.add_argument("--quick", action="store_true", help="the smallest model; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    found = rows(quick)
    if not quick:
        RESULT.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
