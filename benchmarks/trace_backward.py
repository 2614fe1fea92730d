"""List the files of `laconic` that one backward pass runs, one per line, each with its purpose.

Two ranks train a small net under DistributedDataParallel with `laconic.compress`. After a few steps, rank 0
records the file of every Python function of the package that runs during `loss.backward()`, in all threads.
Before the path was simplified there were 54; now there are 35.

    python -m benchmarks.trace_backward [SPEC]      # default: dgc
"""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic

RANKS = 2
STEPS = 5  # before the traced one, which also measures the noise scale: it does so in every fifth step
ROOT = Path(laconic.__file__).parent


class Trace:
    """Profile function that collects the files of the package while `on` is set."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self.on and event == "call":
            self.files.add(frame.f_code.co_filename)


def trace_backward(spec: str) -> list[str]:
    """Return the files of the package that a backward pass uses, sorted; called by all ranks."""
    trace = Trace()
    threading.setprofile(trace)  # before the exchange starts its thread
    sys.setprofile(trace)
    try:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        handle = laconic.compress(model, optimizer, spec)
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            trace.on = step == STEPS
            loss.backward()
            trace.on = False
            optimizer.step()
        handle.remove()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    own = (Path(file) for file in trace.files)
    return sorted(str(file.relative_to(ROOT)) for file in own if file.is_relative_to(ROOT))


def purpose(file: str) -> str:
    """Return the first line of the docstring of a file of the package."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def play(rank: int, spec: str, store: str) -> None:
    """Run one rank; rank 0 prints the files."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    files = trace_backward(spec)
    if rank == 0:
        for file in files:
            print(f"{file:36}{purpose(file)}", flush=True)
        print(f"{len(files)} files", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Print the files for the spec on the command line."""
    spec = sys.argv[1] if len(sys.argv) > 1 else "dgc"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(play, (spec, f"{folder}/store"), nprocs=RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
