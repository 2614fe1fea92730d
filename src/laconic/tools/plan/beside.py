"""Slowdown of messages and computing at once: ranks multiply matrices while a thread exchanges messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch

from laconic.comm import wire_model
from laconic.comm.comm import Comm
from laconic.tools.plan.network import Network

SIDE = 512
ALONE_S = 0.5
LONG_S, MAX_BYTES = 0.25, 1 << 26  # duration of a long call on an idle link, and its largest size
SHORT_TIMES, LONG_TIMES = 15, 3


def probe_beside(comm: Comm, network: Network) -> Network:
    """Return the network with figures under load, equal on all ranks. Collective."""
    end = time.perf_counter() + ALONE_S
    idle_rate = _mean(comm, _products(lambda: time.perf_counter() >= end))
    short = torch.zeros(comm.size, dtype=torch.float32, device="cpu")
    waited_s, _ = _together(comm, lambda: comm.all_reduce(short), SHORT_TIMES)
    nbytes = max(1, int(min(LONG_S * network.bytes_a_second, MAX_BYTES) / (comm.size - 1)))
    message = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    passed_s, busy_rate = _together(comm, lambda: comm.all_gather(message), LONG_TIMES)
    lost_s = max(0.0, 1 - busy_rate / idle_rate) * passed_s
    return replace(
        network,
        busy_latency_s=max(network.latency_s, waited_s / wire_model.rounds(4 * comm.size, comm.size)),
        toll_s_a_byte=lost_s / (nbytes * (comm.size - 1)),
    )


def _together(comm: Comm, call: Callable[[], object], times: int) -> tuple[float, float]:

    def calls() -> float:
        clock = [time.perf_counter()]
        for _ in range(times):
            call()
            clock.append(time.perf_counter())
        return median(later - sooner for sooner, later in pairwise(clock))

    with ThreadPoolExecutor(1) as pool:
        exchange = pool.submit(calls)
        products = _products(exchange.done)
        seconds = torch.tensor([exchange.result()], dtype=torch.float64, device="cpu")
    return float(comm.all_reduce(seconds, "max")), _mean(comm, products)


def _products(ended: Callable[[], bool]) -> float:
    a, out = (
        torch.ones(SIDE, SIDE, dtype=torch.float32, device="cpu"),
        torch.empty(SIDE, SIDE, dtype=torch.float32, device="cpu"),
    )
    start, done = time.perf_counter(), 0
    while not ended() or not done:
        torch.mm(a, a, out=out)
        done += 1
    return done / (time.perf_counter() - start)


def _mean(comm: Comm, figure: float) -> float:
    return float(comm.all_reduce(torch.tensor([figure], dtype=torch.float64, device="cpu"))) / comm.size
