"""Comparison of tensors bit for bit, and counts of the times that the host waits for the GPU."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WAIT = "called a synchronizing CUDA operation"  # torch warns so
POISON = (0xAB, 0x7F)  # bytes that uninitialised memory holds in the two runs of a kernel


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, wherever they are."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(flat(a).view(torch.uint8), flat(b).view(torch.uint8))


def flat(x: Tensor) -> Tensor:
    """Return a flat copy on the CPU whose bytes can be viewed: of one element, too, the stride is 1."""
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().cpu().flatten())


def difference(a: Tensor, b: Tensor) -> str:
    """Return in words how tensor a differs from tensor b.

    >>> difference(torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3]))
    '1 of 3 differ, first at 2: 4 and 3'
    """
    a, b = flat(a), flat(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    if a.numel() == 0 or same(a, b):
        return "equal"
    apart = (a.view(torch.uint8).view(a.numel(), -1) != b.view(torch.uint8).view(b.numel(), -1)).any(dim=1)
    first = int(apart.nonzero()[0])
    return (
        f"{int(apart.sum())} of {a.numel()} differ, first at {first}: {a[first].item()} and {b[first].item()}"
    )


def relative(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |b|, in float64; infinite where the shapes differ.

    >>> relative(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]))
    0.0
    """
    if a.shape != b.shape:
        return float("inf")
    x, y = (each.detach().cpu().double().flatten() for each in (a, b))
    return float((x - y).norm() / y.norm().clamp(min=1e-300))


def poison(device: torch.device, sizes: Sequence[int], byte: int) -> None:
    """Fill memory of these sizes and free it: the next tensors of these sizes hold these bytes.

    A kernel that leaves an element of its output unwritten then differs from the reference.
    """
    blocks = [torch.full((nbytes,), byte, dtype=torch.uint8, device=device) for nbytes in sizes]
    del blocks


class Waits:
    """Counter of the times that the host waits for the GPU in a `with` block, with the lines that wait."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._catch = warnings.catch_warnings(record=True)
        self.count: int | None = None
        self.where: list[tuple[str, int]] = []

    def __enter__(self) -> Waits:
        self._seen: Any = self._catch.__enter__()  # a list, empty now
        warnings.simplefilter("always")
        if self._cuda:
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            torch.cuda.set_sync_debug_mode("default")
        self._catch.__exit__(None, None, None)
        waits = [each for each in self._seen if WAIT in str(each.message)]
        lines = [f"{each.filename.split('/laconic/')[-1]}:{each.lineno}" for each in waits]
        self.where = Counter(lines).most_common(6)
        self.count = len(lines) if self._cuda else None


def outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the result of a call and None, or None and its error."""
    try:
        return call(), None
    except Exception as error:
        return None, error
