"""Counts of what a GPU program pays for: host waits, launches and bytes moved.

A wait is an operation after which the host knows something that the GPU has computed, or for which it copies
pageable memory: it lasts until all queued work is done. A launch is an operation that is neither a view nor
metadata; some operations of torch launch several kernels, so the number is a lower bound.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# The size of the result, or the result itself, is known to the host.
READS = {
    "_local_scalar_dense",
    "nonzero",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "_linalg_svd",  # these read an error code
    "_linalg_eigh",
    "_linalg_solve_ex",
    "linalg_inv_ex",
    "linalg_cholesky_ex",
}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
METADATA = {
    "_local_scalar_dense",
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "equal",
    "is_pinned",
    "lift",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
}


@dataclass
class Counts:
    """Counts of one `counted` block.

    Attributes:
        waits: How often the host waits, by thread, operation and line of the library.
        launches: Operations that start work on the device.
        moved: Bytes that these read and write.
    """

    waits: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    moved: int = 0

    def num_waits(self, thread: str = "") -> int:
        """The number of waits in threads whose names begin so; default: in all."""
        return sum(count for (name, _, _), count in self.waits.items() if name.startswith(thread))

    @property
    def num_launches(self) -> int:
        return self.launches.total()

    def where(self, most: int = 8) -> list[str]:
        """The lines that wait most often, for messages of failed tests."""
        lines: Counter[str] = Counter()
        for (thread, name, line), count in self.waits.items():
            lines[f"{line} {name} in {thread}"] += count
        return [f"{count} x {line}" for line, count in lines.most_common(most)]


_lock = threading.Lock()
_live: list[tuple[Counts, int | None]] = []  # with the thread that they are of, None for all
_paused = threading.local()


@contextmanager
def counted(all_threads: bool = False) -> Iterator[Counts]:
    """Count the operations on the device while the block runs: this thread's, or those of all threads."""
    entry = Counts(), None if all_threads else threading.get_ident()
    with _lock:
        _live.append(entry)
    try:
        yield entry[0]
    finally:
        with _lock:
            _live.remove(entry)


@contextmanager
def paused() -> Iterator[None]:
    """Leave this thread's operations out: the harness's own, or those that stand for one kernel."""
    before = getattr(_paused, "on", False)
    _paused.on = True
    try:
        yield
    finally:
        _paused.on = before


def record(func: Any, kwargs: dict[str, Any], inputs: Sequence[Tensor], result: Any, copies: str) -> None:
    """Count one operation on the device.

    Args:
        func: The operation, an `OpOverload`.
        kwargs: Its keyword arguments.
        inputs: Its tensors, all of them on the device, or on the host if it copies from there.
        result: Its result.
        copies: "to the host", "to the device", or "" for an operation within the device.
    """
    if not _live or getattr(_paused, "on", False):
        return
    name = func.overloadpacket.__name__
    wait = waits(name, kwargs, inputs, copies)
    outputs = [each for each in _tensors(result) if each.numel()]
    launched = bool(outputs) and not func.is_view and name not in METADATA
    moved = sum(map(nbytes, inputs)) + sum(map(nbytes, outputs)) if launched else 0
    key = (threading.current_thread().name, wait, _line()) if wait else None
    with _lock:
        for counts in _mine():
            if key:
                counts.waits[key] += 1
            if launched:
                counts.launches[name] += 1
                counts.moved += moved


def launch(name: str, number: int = 1, moved: int = 0) -> None:
    """Count launches of a kernel that is no operation of torch."""
    if not getattr(_paused, "on", False):
        with _lock:
            for counts in _mine():
                counts.launches[name] += number
                counts.moved += moved


def waits(name: str, kwargs: dict[str, Any], inputs: Sequence[Tensor], copies: str) -> str:
    """Return why the host waits for this operation; "" if it does not."""
    if copies:
        empty = not any(each.numel() for each in inputs)
        return "" if empty or (copies == "to the device" and kwargs.get("non_blocking")) else f"copy {copies}"
    if name in INDEXED and any(each.dtype in (torch.bool, torch.uint8) for each in inputs[1:]):
        filled = name != "index" and inputs[-1].numel() == 1  # torch calls masked_fill_ then
        return "" if filled else "boolean index"
    if name == "repeat_interleave":
        return "" if kwargs.get("output_size") is not None else "repeat_interleave"
    return name if name in READS else ""


def nbytes(x: Tensor) -> int:
    """Bytes that a tensor occupies; those of an expanded one count once."""
    n = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        n *= size if stride else 1
    return n if x.numel() else 0


def _mine() -> list[Counts]:
    own = threading.get_ident()
    return [counts for counts, thread in _live if thread in (None, own)]


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [each for each in result if isinstance(each, Tensor)] if isinstance(result, (tuple, list)) else []


def _line() -> str:
    """The line of the library that is being run."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/laconic/")
        if found:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
