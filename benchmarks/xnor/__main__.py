"""Products of signs against float32 and int8 products of torch, one thread, in one run.

    python -m benchmarks.xnor            writes benchmarks/xnor/results.jsonl: 10 to 30 minutes
    python -m benchmarks.xnor --quick    a few rounds, which writes nothing

In every round each call runs six times in a row, and the least processor time of its thread counts: a shared
machine interrupts calls, and empties their caches. A figure is the median over rounds of the ratio inside a
round. Inputs are float32 for ours and are packed in the call; torch's int8 product gets int8, for free. A
convolution has no int8 form in torch: it is held against float32 alone.

Where AVX2 is the widest there is, torch's int8 product is another one: results have the key "avx2" then,
otherwise "avx512".
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from laconic import kernels

RUNS = Results(Path(__file__).with_name("results.jsonl"))
SIZE, COUNT, QUICK, REPEATS = 1024, 15, 2, 6
DENSE = {
    "1024^3": (SIZE, SIZE, SIZE),
    "one row of 1024 x 1024": (1, SIZE, SIZE),
    "CIFAR dense": (100, 256, 2048),
}
CONVS = {  # images, channels, outputs, side: the layers of `benchmarks.lowbit`'s net
    "CIFAR 32 to 64, 32 x 32": (32, 32, 64, 32),
    "CIFAR 64 to 128, 16 x 16": (32, 64, 128, 16),
    "CIFAR 128 to 128, 8 x 8": (32, 128, 128, 8),
}
BARS = {"avx512": (20, 4), "avx2": (6, 1.2)}  # at 1024^3, times faster than float32 and than int8


def live(name: str, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same work on this implementation."""

    def call() -> Tensor:
        with kernels.using(name):
            return work()

    return call


def dense(name: str, m: int, outputs: int, n: int, count: int) -> Iterator[dict[str, Any]]:
    """A row for each implementation at one dense product."""
    x, weight = torch.randn(m, n), torch.randn(outputs, n)
    bits, small = (
        kernels.xnor_pack(weight),
        [torch.where(each >= 0, 1, -1).to(torch.int8) for each in (x, weight)],
    )
    calls: dict[str, Callable[[], Tensor]] = {"float32": lambda: torch.mm(x, weight.T)}
    if m > 16:  # torch takes no fewer rows
        turned = small[1].T.contiguous()
        calls["int8"] = lambda: torch._int_mm(small[0], turned)
    yield from measured(name, calls, lambda: kernels.xnor_matmul(x, bits), m * outputs * n, count)


def convolution(
    name: str, images: int, channels: int, outputs: int, side: int, count: int
) -> Iterator[dict[str, Any]]:
    """A row for each implementation at one 3 x 3 convolution."""
    x, weight = torch.randn(images, channels, side, side), torch.randn(outputs, channels, 3, 3)
    rows = weight.permute(0, 2, 3, 1).reshape(-1, channels).contiguous()
    bits = kernels.xnor_pack(rows).view(outputs, 3, 3, -1)
    calls: dict[str, Callable[[], Tensor]] = {"float32": lambda: F.conv2d(x, weight, padding=1)}
    products = images * outputs * channels * 9 * side * side
    yield from measured(name, calls, lambda: kernels.xnor_conv2d(x, bits, padding=(1, 1)), products, count)


def measured(
    name: str, calls: dict[str, Callable[[], Tensor]], ours: Callable[[], Tensor], products: int, count: int
) -> Iterator[dict[str, Any]]:
    """A row for each native implementation, each from rounds of its own with torch's calls."""
    for each in kernels.runnable()[1:]:
        times = rounds(calls | {each: live(each, ours)}, count)
        medians = {
            to: statistics.median(a / b for a, b in zip(times[to], times[each], strict=True)) for to in calls
        }
        seconds = statistics.median(times[each])
        popcount = each == "avx512" and "avx512vpopcntdq" in kernels.info()["cpu_features"]
        yield {
            "what": name,
            "kernel": f"{each} VPOPCNTDQ" if popcount else each,
            "ms": round(1e3 * seconds, 4),
            "gop_s": round(2 * products / seconds / 1e9),
            "times_float32": round(medians["float32"], 2),
            "times_int8": round(medians["int8"], 2) if "int8" in medians else None,
            "bars": BARS.get(each) if name == "1024^3" else None,
        }


def rounds(calls: dict[str, Callable[[], Tensor]], count: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, all in turn, each the least of some."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            times[name].append(min(once(call) for _ in range(REPEATS)))
    return times


def once(call: Callable[[], Tensor]) -> float:
    """Seconds of one call."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def main() -> None:
    """Measure, and write unless --quick."""
    options = argparse.ArgumentParser(prog="benchmarks.xnor")
    options.add_argument("--quick", action="store_true", help="a few rounds, which writes nothing")
    count = QUICK if options.parse_args().quick else COUNT
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row for name, shape in DENSE.items() for row in dense(name, *shape, count)]
    rows += [row for name, shape in CONVS.items() for row in convolution(name, *shape, count)]
    for row in rows:
        print(row)
    if count == COUNT:
        widest = "avx2" if kernels.runnable()[-1] == "avx2" else "avx512"
        RUNS.put(widest, {"machine": machine(), "rounds": count, "rows": rows})


if __name__ == "__main__":
    main()
