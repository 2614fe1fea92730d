"""Times of calls on a GPU by events, without the time that the host takes to launch them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from laconic.core.deferred import deferred

ROUNDS = 30
AHEAD = 3_000_000  # cycles that the GPU sleeps while the host launches a call: 1.5 ms
Call = Callable[[], object]


def gpu_us(calls: Sequence[Call], device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median microseconds on the GPU of calls that are made in turn.

    The calls do the same with different buffers, so that none finds its data in the cache. Checks of flags
    are put off until after the measurement. On a CPU it is the host's time.
    """
    return statistics.median(_times(calls, device, rounds))


def _times(calls: Sequence[Call], device: torch.device, rounds: int) -> list[float]:
    for call in calls:
        call()
    if device.type != "cuda":
        return [_host_us(calls[i % len(calls)]) for i in range(min(rounds, 5))]
    pairs = []
    torch.cuda.synchronize(device)
    with deferred():
        for i in range(rounds):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call]
            first.record()  # type: ignore[no-untyped-call]
            calls[i % len(calls)]()
            last.record()  # type: ignore[no-untyped-call]
            pairs.append((first, last))
            if i % 5 == 4:
                torch.cuda.synchronize(device)
        torch.cuda.synchronize(device)
    return [1e3 * first.elapsed_time(last) for first, last in pairs]


def busy_us(calls: Sequence[Call], device: torch.device, rounds: int = 9) -> float:
    """Return the mean microseconds in which the GPU works during a call, by torch's profiler.

    For calls that read from the GPU: events around these would count what the host does after the read.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for i in range(rounds):
            calls[i % len(calls)]()
        torch.cuda.synchronize(device)
    events = [each for each in found.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    return float(sum(each.self_device_time_total for each in events) / rounds)


def host_us(calls: Sequence[Call], device: torch.device, rounds: int = 10) -> float:
    """Return the median microseconds of calls as a caller sees them, each waited for."""
    calls[0]()
    times = []
    for i in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        call = calls[i % len(calls)]
        times.append(_host_us(lambda: (call(), _wait(device))))  # noqa: B023
    return statistics.median(times)


def _host_us(call: Call) -> float:
    began = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@lru_cache(maxsize=256)
def copy_us(device: torch.device, nbytes: int) -> float:
    """Return the microseconds of a copy that reads and writes this many bytes together."""
    each = max(1, nbytes // 2)
    count = max(2, min(8, (1 << 28) // each))
    sources = [torch.empty(each, dtype=torch.uint8, device=device) for _ in range(count)]
    targets = [torch.empty_like(source) for source in sources]
    pairs = zip(sources, targets, strict=True)
    return gpu_us([lambda a=a, b=b: b.copy_(a) for a, b in pairs], device)  # type: ignore[misc]
