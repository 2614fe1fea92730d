"""Waits, launches and bytes of one bucket's exchange, on the stand-in device.

`python -m tests.device.measure --out FILE` writes a JSON list, one entry for each method, number of matrices
and number of ranks. Rank 0 is on the device, and counts; the others are on the CPU, which is faster. Their
exchange does not count. With TRITON_INTERPRET=1 and Triton, its kernels count as the launches that they are.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from laconic.codecs.sign import Sign
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import Method, lift
from laconic.fsdp.chunks import chunks
from laconic.fsdp.reduce_scatter import Scatter, Shards
from laconic.optim.inner import both_ways
from laconic.reducers.scatter_reduce import ScatterReduce
from tests.device import counting, device, triton
from tests.device.worlds import CPU, GPU
from tests.laws.worlds import Settings

SHAPE = (80, 64)  # one whole tile of the Triton kernels and a shorter one
MATRICES = (1, 3) if triton.interpreted() else (1, 54, 161)  # the interpreter is slow
RANKS = (2, 8)
WARM = 1  # steps before the one that counts: tables are cached, memory is in use

METHODS: dict[str, Callable[[], Method]] = {
    "dgc": lambda: lift("dgc(density=0.001)"),
    "qsgd": lambda: lift("qsgd(levels=7)"),
    "cgx": lambda: lift("cgx(bits=4)"),
    "powersgd": lambda: lift("powersgd(rank=2)"),
    "terngrad": lambda: lift("terngrad()"),
    "onebit_adam": lambda: both_ways(Sign()),  # what its optimiser exchanges after the warm-up
}
OTHERS = (  # without a separate budget
    "topk(density=0.01)",
    "stc()",
    "deft(density=0.01)",
    "oktopk(density=0.01)",
    "gtopk(density=0.01)",
    "micro(density=0.01)",
    "exdyna(density=0.01)",
    "cltk(density=0.01)",
    "sketchml()",
    "fastsgd()",
    "dhqc()",
)
FSDP = "FSDP2 cgx"
NAMES = (*METHODS, FSDP)


def measured(name: str, matrices: int, ranks: int) -> dict[str, Any]:
    """Counts of one bucket of so many matrices, on rank 0 of so many."""
    layout = Layout.of((f"{i}.weight", SHAPE) for i in range(matrices))

    def play(comm: Loopback) -> counting.Counts:
        here = GPU if comm.rank == 0 or name == FSDP else CPU  # FSDP2's ranks sum a flag if on a GPU
        _own.device = here
        step = (
            sharded_modules(Metered(comm), layout)
            if name == FSDP
            else exchanging(name, Metered(comm), layout)
        )
        rng = torch.Generator().manual_seed(comm.rank)
        gradients = [(torch.randn(layout.numel, generator=rng) ** 3).to(here) for _ in range(WARM + 1)]
        for gradient in gradients[:WARM]:
            step(gradient)
        with counting.counted() as counts:
            step(gradients[WARM])
        return counts

    with across_devices():
        counts = Loopback.run(ranks, play, timeout_s=600)[0]
    return {
        "method": name,
        "kernels": "triton" if triton.interpreted() else "reference",
        "matrices": matrices,
        "ranks": ranks,
        "waits": counts.num_waits(),
        "launches": counts.num_launches,
        "bytes_per_element": round(counts.moved / layout.numel, 1),
        "index_adds": counts.launches["index_add_"],
        "waits_at": counts.where(),
        "launched": dict(counts.launches.most_common(12)),
    }


def exchanging(name: str, comm: Metered, layout: Layout) -> Callable[[Tensor], None]:
    """A step of DDP's communication thread, by one bucket."""
    momentum = 0.0 if name == "onebit_adam" else 0.9  # its own optimiser applies momentum
    method = METHODS[name]() if name in METHODS else lift(name)
    exchange = Attached(method, layout, comm, Settings(momentum))

    def step(gradient: Tensor) -> None:
        exchange.begin()
        assert exchange.mean_(gradient, layout)
        exchange.end()

    return step


def sharded_modules(comm: Metered, layout: Layout) -> Callable[[Tensor], None]:
    """A reduce-scatter of FSDP2 by one module: its gradients come as one flat chunk for each rank."""
    reducer = lift("cgx(bits=4)").routes[0].reducer
    assert isinstance(reducer, ScatterReduce)
    shards = Shards(comm, seed=0)
    scatter = Scatter(reducer, torch.nn.Module(), shards)
    partition = chunks("module", layout.numel, comm.rank, comm.size)

    def step(gradient: Tensor) -> None:
        assert scatter.mean(gradient, partition, "module") is not None
        shards.step += 1

    return step


_own = threading.local()  # the device of each rank


@contextmanager
def across_devices() -> Iterator[None]:
    """Let Loopback give each rank what others sent on its own device, without counting that."""
    share = Loopback._share

    def moving(comm: Loopback, name: str, given: Any, read: Callable[[list[Any]], Any]) -> Any:
        def read_here(all_given: list[Any]) -> Any:
            return read([moved(each, _own.device) for each in all_given])

        with counting.paused():
            return share(comm, name, given, read if name in ("split", "counter") else read_here)

    with mock.patch.object(Loopback, "_share", moving):
        yield


def moved(given: Any, to: torch.device) -> Any:
    """Tensors that a rank sends, on another device."""
    if isinstance(given, Tensor):
        return given.to(to)
    if isinstance(given, Mapping):
        return {key: moved(value, to) for key, value in given.items()}
    return [moved(each, to) for each in given]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the file to write; default: standard output")
    parser.add_argument("--only", choices=(*NAMES, *OTHERS), help="one method")
    parser.add_argument("--others", action="store_true", help="methods without a budget")
    parser.add_argument("--matrices", type=int, nargs="+", default=MATRICES, help="numbers of matrices")
    options = parser.parse_args()
    if device.missing():
        sys.exit(device.missing())
    device.install()
    if triton.interpreted():
        triton.install()
    names = [options.only] if options.only else OTHERS if options.others else NAMES
    rows: list[dict[str, Any]] = []
    for matrices in options.matrices:
        for ranks in RANKS:
            for name in names:
                rows.append(measured(name, matrices, ranks))
                print({key: rows[-1][key] for key in [*rows[-1]][:7]}, file=sys.stderr, flush=True)
                if options.out is not None:  # at once: a slow machine may not finish
                    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    if options.out is None:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
