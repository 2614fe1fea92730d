"""Beside: what messages and computing take from each other, where workers do both at once.

Processors carry messages too: copies, checksums, the system's share. Where a worker has few of them, a
message waits for its turn, and a byte costs the worker some of its computing. Both are measured: all ranks
multiply matrices, while a thread of each exchanges.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch

from laconic.comm import link
from laconic.comm.comm import Comm
from laconic.plan.network import Network

SIDE = 512  # of the square matrices: a product takes a millisecond or so
ALONE_S = 0.5  # of computing with no messages
LONG_S, LONGEST = 0.25, 1 << 26  # that a long call should take on an idle link, and its bytes at most
SHORT_TIMES, LONG_TIMES = 15, 3


def probe_beside(comm: Comm, network: Network) -> Network:
    """The same network, and how it goes with computing; the same on all ranks, which all call it."""
    until = time.perf_counter() + ALONE_S
    pace = _mean(comm, _products(lambda: time.perf_counter() >= until))
    short = torch.zeros(comm.size)
    waited_s, _ = _together(comm, lambda: comm.all_reduce(short), SHORT_TIMES)
    nbytes = max(1, int(min(LONG_S * network.bytes_a_second, LONGEST) / (comm.size - 1)))
    message = torch.zeros(nbytes, dtype=torch.uint8)
    passed_s, slowed = _together(comm, lambda: comm.all_gather(message), LONG_TIMES)
    lost_s = max(0.0, 1 - slowed / pace) * passed_s
    return replace(
        network,
        busy_latency_s=max(network.latency_s, waited_s / link.rounds(4 * comm.size, comm.size)),
        toll_s_a_byte=lost_s / (nbytes * (comm.size - 1)),
    )


def _together(comm: Comm, call: Callable[[], object], times: int) -> tuple[float, float]:
    """Seconds of a call while all ranks compute, the slowest rank's; and the pace of computing meanwhile."""

    def calls() -> float:
        clock = [time.perf_counter()]
        for _ in range(times):
            call()
            clock.append(time.perf_counter())
        return median(later - sooner for sooner, later in pairwise(clock))

    with ThreadPoolExecutor(1) as pool:
        exchange = pool.submit(calls)
        products = _products(exchange.done)
        seconds = torch.tensor([exchange.result()], dtype=torch.float64)
    return float(comm.all_reduce(seconds, "max")), _mean(comm, products)


def _products(ended: Callable[[], bool]) -> float:
    """Products of matrices a second, until it has ended."""
    a, out = torch.ones(SIDE, SIDE), torch.empty(SIDE, SIDE)
    began, done = time.perf_counter(), 0
    while not ended() or not done:
        torch.mm(a, a, out=out)
        done += 1
    return done / (time.perf_counter() - began)


def _mean(comm: Comm, figure: float) -> float:
    """Over ranks, the same on all."""
    return float(comm.all_reduce(torch.tensor([figure], dtype=torch.float64))) / comm.size
