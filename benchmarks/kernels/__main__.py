"""Time of the kernels on one thread, as a multiple of `copy_` of the same tensor in the same run.

    python -m benchmarks.kernels            15 rounds; writes benchmarks/kernels/results.json
    python -m benchmarks.kernels --quick    4 rounds; writes nothing

25 M elements at density 0.001; `benchmarks/common/timing.py` says how times are measured.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.machine import machine
from benchmarks.common.resnet50 import SIZES
from benchmarks.common.timing import Call, Row, ratio, rounds, save, show
from laconic import kernels
from laconic.core.layout import Segments

DENSITY, SAMPLE = 0.001, 0.01
RESULT = Path(__file__).with_name("results.json")


def ks_of(segments: Segments) -> Tensor:
    return torch.tensor([math.ceil(DENSITY * n) for n in segments.sizes])


class LocalPath:
    """The local path of DGC on flat buffers: update, select, write the message, settle."""

    def __init__(self, segments: Segments) -> None:
        self.segments, self.ks = segments, ks_of(segments)
        rng = torch.Generator().manual_seed(0)
        self.grad = torch.randn(segments.end, generator=rng)
        self.velocity, self.residual = torch.zeros(segments.end), torch.zeros(segments.end)
        self.momentum = torch.full((len(segments),), 0.9)
        self.turn = 0

    def select(self) -> tuple[Tensor, Tensor]:
        self.turn += 1
        keys = [1000 * self.turn + i for i in range(len(self.segments))]
        return kernels.sampled_topk(self.residual, self.segments, self.ks, DENSITY, SAMPLE, keys)

    def message(self, indices: Tensor, counts: Tensor) -> Tensor:
        values = kernels.gather(self.residual, self.segments, indices, counts)
        positions = kernels.rice_encode(indices, counts, self.segments)
        return torch.cat([counts.to(torch.int32).view(torch.uint8), positions, values.view(torch.uint8)])

    def dgc(self) -> Tensor:
        # the old velocity is the next gradient, times 0.1: nothing grows
        kernels.velocity_(
            self.velocity, self.residual, self.grad, self.residual, self.segments, self.momentum, 0.1
        )
        indices, counts = self.select()
        wire = self.message(indices, counts)
        kernels.scatter_zero_(self.residual, self.segments, indices, counts)
        kernels.scatter_zero_(self.velocity, self.segments, indices, counts)
        return wire

    def feedback(self) -> tuple[Tensor, Tensor]:
        kernels.accumulate_(self.residual, self.grad, self.segments)
        return self.select()

    def exact(self) -> tuple[Tensor, Tensor]:
        return kernels.topk(self.residual, self.segments, self.ks)

    def torch_exact(self) -> Tensor:
        best = torch.topk(self.residual.abs(), int(self.ks.sum()), sorted=False).indices
        return self.residual[best]


def peak(call: Call) -> int | None:
    """Most bytes of memory that a call takes beyond what is there, or None where the kernel does not tell."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None

    def read(name: str) -> int:
        return next(1024 * int(line.split()[1]) for line in status.read_text().splitlines() if name in line)

    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls have freed is not there for this one
    reset.write_text("5")
    before = read("VmRSS")
    call()
    return max(0, read("VmHWM") - before)


def local_paths(n: int, count: int) -> list[Row]:
    """The paths of one flat tensor against `copy_`."""
    path = LocalPath(Segments.whole(n))
    copy = torch.zeros(n)
    calls: dict[str, Call] = {
        "copy_": lambda: copy.copy_(path.grad),
        "dgc": path.dgc,
        "feedback": path.feedback,
        "exact": path.exact,
    }
    times = rounds(calls, count)
    rows: list[Row] = [("copy_", "ms", 1e3 * statistics.median(times["copy_"]), None, "")]
    for name, bar, what in (
        ("dgc", 3.5, "DGC: velocity, sampled top-k, gather, encode, settle"),
        ("feedback", 3.0, "error feedback + sampled top-k"),
        ("exact", 4.0, "exact top-k"),
    ):
        rows.append((what, "x copy_", *ratio(times, name, "copy_", bar)))
    slow = rounds({"exact": path.exact, "torch": path.torch_exact}, max(2, count // 4))
    rows.append(("torch.topk(abs) + gather", "x exact top-k", *ratio(slow, "torch", "exact", -8.0)))
    for name, call in (("DGC", path.dgc), ("feedback", path.feedback), ("exact top-k", path.exact)):
        call()
        extra = peak(call)
        if extra is not None:
            rows.append((f"peak extra memory, {name}", "% of tensor", 100 * extra / (4 * n), 5.0, ""))
    return rows


def many_tensors(count: int) -> list[Row]:
    """ResNet-50's 161 tensors against one flat tensor of as many elements."""
    flat, parts = LocalPath(Segments.whole(sum(SIZES))), LocalPath(Segments.consecutive(SIZES))
    times = rounds({"flat": flat.dgc, "parts": parts.dgc}, count)
    exact = rounds({"flat": flat.exact, "parts": parts.exact}, count)
    return [
        ("161 tensors, DGC's path", "x one flat tensor", *ratio(times, "parts", "flat", 1.5)),
        ("161 tensors, exact top-k", "x one flat tensor", *ratio(exact, "parts", "flat", 1.5)),
    ]


def coding(n: int, count: int) -> list[Row]:
    """Golomb-Rice: bits against log2 C(n, k), and indices a second."""
    rows: list[Row] = []
    whole = Segments.whole(n)
    for density in (0.04, 0.01, 0.001):
        k = math.ceil(density * n)
        indices, counts = kernels.random_indices(torch.tensor([n]), torch.tensor([k]), (1,))
        wire = kernels.rice_encode(indices, counts, whole)
        least = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
        rows.append(
            (f"Golomb-Rice at {density}", "x log2 C(n, k)", 8 * wire.numel() / least, 1.02, f"k = {k}")
        )
        calls: dict[str, Call] = {
            "encode": lambda i=indices, c=counts: kernels.rice_encode(i, c, whole),
            "decode": lambda w=wire, c=counts: kernels.rice_decode(w, c, whole),
        }
        for name, times in rounds(calls, 5 * count).items():
            bar = -100.0 if name == "decode" else None
            rows.append((f"  {name}", "M indices/s", k / min(times) / 1e6, bar, "least of the times"))
    return rows


def packing(n: int, count: int) -> list[Row]:
    """Bit packing, in codes a second."""
    rows: list[Row] = []
    for bits in (1, 2, 4, 8, 13):
        codes = kernels.philox(bits, n) & ((1 << bits) - 1)
        wire = kernels.pack_bits(codes, bits)
        calls: dict[str, Call] = {
            "pack": lambda c=codes, b=bits: kernels.pack_bits(c, b),
            "unpack": lambda w=wire, b=bits: kernels.unpack_bits(w, b, n),
        }
        for name, times in rounds(calls, count).items():
            rows.append(
                (f"{name} {bits} bits", "G codes/s", n / min(times) / 1e9, None, "least of the times")
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, no file")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    n, count = 25_000_000, 4 if quick else 15
    rows = [
        *local_paths(n, count),
        *many_tensors(count),
        *coding(n, count),
        *packing(n // 10, count),
    ]
    about: dict[str, Any] = {**machine(), "threads": 1, "n": n, "density": DENSITY, "rounds": count}
    show(f"kernels: {n:,} float32, density {DENSITY}, one thread, {about['kernels']}", rows)
    if not quick:
        save(RESULT, about, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
