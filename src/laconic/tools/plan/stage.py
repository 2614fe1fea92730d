"""Parts of a rehearsal: turns, a stopwatch, and gradients."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic.comm.comm import Comm, ReduceOp
from laconic.comm.counter import Counter
from laconic.core.layout import Layout
from laconic.core.turn import mix

SHARED = 0.5  # scale of the shared gradient, relative to a worker's noise


class Watch:
    """CPU seconds of a thread: `before_s` until its first collective, then `after_s`, outside collectives."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.before_s = self.after_s = 0.0
        self._met = False
        self._since = time.thread_time()

    def pause(self) -> None:
        self.stop()
        self._met = True

    def resume(self) -> None:
        self._since = time.thread_time()

    def stop(self) -> None:
        passed = time.thread_time() - self._since
        if self._met:
            self.after_s += passed
        else:
            self.before_s += passed


class InTurn(Comm):
    """`Comm` of a thread that holds a lock, except during collectives."""

    def __init__(self, comm: Comm, baton: threading.Lock, watch: Watch) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.watch, self._baton = watch, baton

    @contextmanager
    def _resting(self) -> Iterator[None]:
        self.watch.pause()
        self._baton.release()
        try:
            yield
        finally:
            self._baton.acquire()
            self.watch.resume()

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum") -> Tensor:
        with self._resting():
            return self.comm.all_reduce(x, op)

    def reduce_scatter(self, chunks: Sequence[Tensor]) -> Tensor:
        with self._resting():
            return self.comm.reduce_scatter(chunks)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        with self._resting():
            return self.comm.all_gather(x)

    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        with self._resting():
            return self.comm.all_to_all(chunks)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        with self._resting():
            return self.comm.broadcast(x, root)

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        with self._resting():
            self.comm.exchange(sends, recvs)

    def split(self, color: int) -> InTurn:
        with self._resting():
            part = self.comm.split(color)
        return InTurn(part, self._baton, self.watch)

    def counter(self) -> Counter:
        with self._resting():
            return self.comm.counter()


class Gradients:
    """Heavy-tailed gradients (cubes of normals), partly equal on all workers."""

    def __init__(self, layout: Layout) -> None:
        rng = torch.Generator("cpu").manual_seed(0)
        n = layout.numel
        self._shared = torch.randn(n, generator=rng, dtype=torch.float32, device="cpu").pow_(3).mul_(SHARED)
        noise = torch.randn(n, generator=rng, dtype=torch.float32, device="cpu").pow_(3)
        self._noise = torch.cat([noise, noise])
        scales = 100 ** torch.rand(len(layout), generator=rng, dtype=torch.float32, device="cpu")
        self._scales = torch.repeat_interleave(scales, layout.segments.sizes_tensor)

    def write_(self, out: Tensor, rank: int, step: int) -> None:
        start = mix(rank, step) % len(out)
        torch.add(self._noise[start : start + len(out)], self._shared, out=out).mul_(self._scales)
