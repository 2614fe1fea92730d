"""Low-rank products by torch: adjacent matrices of one shape form a batch.

torch's order of addition may depend on the batch size: bits are equal only on ranks with the same devices and
buckets.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from laconic.kernels.lowrank.matrices import Matrices
from laconic.kernels.lowrank.reference import SPENT

LARGE = 1 << 22  # elements: above, a copy into a batch does not pay
PADDED = 1 << 20  # elements: below, all factors share a padded batch


@dataclass(frozen=True)
class Run:
    """Adjacent matrices `first` to `last` - 1 of one shape. `distance`: between their starts, if constant."""

    first: int
    last: int
    rows: int
    cols: int
    left: int
    right: int
    distance: int | None

    def __len__(self) -> int:
        return self.last - self.first


def times(x: Tensor, matrices: Matrices, right: Tensor, left: Tensor) -> None:
    with ieee_products(x.device):
        for run, batch in _batches(x, matrices):
            p, q = _factors(run, matrices.rank, left, right)
            torch.bmm(q, batch.mT, out=p)


def transposed_times(x: Tensor, matrices: Matrices, left: Tensor, right: Tensor) -> None:
    with ieee_products(x.device):
        for run, batch in _batches(x, matrices):
            p, q = _factors(run, matrices.rank, left, right)
            torch.bmm(p, batch, out=q)


def product_add_(x: Tensor, matrices: Matrices, left: Tensor, right: Tensor, alpha: float) -> None:
    scattered: list[Tensor] = []
    products: list[Tensor] = []
    with ieee_products(x.device):
        for run in runs_of(matrices):
            p, q = _factors(run, matrices.rank, left, right)
            if run.distance is None:
                scattered += _views(x, matrices, run)
                products += torch.bmm(p.mT, q).view(len(run), -1).unbind()
            else:
                _regular(x, matrices, run).baddbmm_(p.mT, q, alpha=alpha)
    if scattered:
        torch._foreach_add_(scattered, products, alpha=alpha)


def orthonormal_(packed: Tensor, rank: int, lengths: tuple[int, ...]) -> None:
    """Apply Gram-Schmidt; padding with zeros changes no sum."""
    for count, length, source, place in _padding(rank, lengths, packed.device):
        given = packed if source is None else packed.index_select(0, source)
        padded = torch.zeros(count * rank * length, dtype=torch.float64, device=packed.device)
        padded.index_copy_(0, place, given.double())
        _orthonormal_(padded.view(count, rank, length))
        made = padded.index_select(0, place)
        if source is None:
            packed.copy_(made)
        else:
            packed.index_copy_(0, source, made.to(packed.dtype))


def _orthonormal_(columns: Tensor) -> None:
    """Orthonormalise float64 (b, rank, length); a non-finite factor becomes NaN."""
    norms = torch.linalg.vector_norm(columns, dim=-1, keepdim=True)
    least = norms * SPENT**0.5
    for k in range(columns.shape[1]):
        column = columns[:, k : k + 1]
        norm = norms[:, :1] if k == 0 else torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        column /= torch.where(norm <= least[:, k : k + 1], torch.inf, norm)
        rest = columns[:, k + 1 :]
        if rest.shape[1]:
            rest.addcmul_(torch.bmm(rest, column.mT), column, value=-1)


@lru_cache(maxsize=512)
def _padding(
    rank: int, lengths: tuple[int, ...], device: torch.device
) -> tuple[tuple[int, int, Tensor | None, Tensor], ...]:
    """Return batches: number, padded length, elements in the packed buffer (None: all), places in the batch.

    Cached: do not modify.
    """
    numel = rank * sum(lengths)
    if len(lengths) * rank * max(lengths, default=0) <= max(PADDED, 4 * numel):
        batches = [list(range(len(lengths)))]
    else:
        ordered = sorted(range(len(lengths)), key=lambda i: lengths[i].bit_length())
        batches = [list(some) for _, some in groupby(ordered, key=lambda i: lengths[i].bit_length())]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + rank * length)
    made = []
    for batch in batches:
        longest = max((lengths[i] for i in batch), default=0)
        if not longest:
            continue
        source = [torch.arange(starts[i], starts[i + 1], dtype=torch.int64, device="cpu") for i in batch]
        place = [
            torch.arange(lengths[i], dtype=torch.int64, device="cpu") + (number * rank + k) * longest
            for number, i in enumerate(batch)
            for k in range(rank)
        ]
        whole = None if len(batches) == 1 else torch.cat(source).to(device)
        made.append((len(batch), longest, whole, torch.cat(place).to(device)))
    return tuple(made)


@lru_cache(maxsize=512)
def runs_of(matrices: Matrices) -> tuple[Run, ...]:
    """Return runs of adjacent matrices of one shape; large ones only if evenly spaced."""
    runs: list[Run] = []
    first = left = right = 0
    while first < len(matrices):
        m, n = matrices.rows[first], matrices.cols[first]
        last = first + 1
        while last < len(matrices) and (matrices.rows[last], matrices.cols[last]) == (m, n):
            last += 1
        distance = _distance(matrices.starts[first:last], m * n)
        if distance is None and m * n >= LARGE:
            last, distance = first + 1, m * n
        runs.append(Run(first, last, m, n, left, right, distance))
        left += (last - first) * matrices.rank * m
        right += (last - first) * matrices.rank * n
        first = last
    return tuple(runs)


def _distance(starts: tuple[int, ...], numel: int) -> int | None:
    distance = starts[1] - starts[0] if len(starts) > 1 else numel
    even = all(start == starts[0] + i * distance for i, start in enumerate(starts))
    return distance if even and distance >= numel else None


def _batches(x: Tensor, matrices: Matrices) -> Iterator[tuple[Run, Tensor]]:
    runs = runs_of(matrices)
    scattered = [view for run in runs if run.distance is None for view in _views(x, matrices, run)]
    copied, at = torch.cat(scattered) if scattered else x, 0
    for run in runs:
        if run.distance is None:
            numel = len(run) * run.rows * run.cols
            yield run, copied[at : at + numel].view(len(run), run.rows, run.cols)
            at += numel
        else:
            yield run, _regular(x, matrices, run)


def _regular(x: Tensor, matrices: Matrices, run: Run) -> Tensor:
    assert run.distance is not None
    start = x.storage_offset() + matrices.starts[run.first]
    return x.as_strided((len(run), run.rows, run.cols), (run.distance, run.cols, 1), start)


def _views(x: Tensor, matrices: Matrices, run: Run) -> list[Tensor]:
    numel = run.rows * run.cols
    return [x[start : start + numel] for start in matrices.starts[run.first : run.last]]


def _factors(run: Run, rank: int, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    count = len(run) * rank
    p = left[run.left : run.left + count * run.rows].view(len(run), rank, run.rows)
    q = right[run.right : run.right + count * run.cols].view(len(run), rank, run.cols)
    return p, q


_lock = threading.Lock()
_inside = 0
_setting = ""


@contextmanager
def ieee_products(device: torch.device) -> Iterator[None]:
    """Switch TF32 off for products in this block, on a GPU.

    torch's switch is process-wide. The last block to end restores it.
    """
    global _inside, _setting
    if device.type != "cuda":
        yield
        return
    with _lock:
        if not _inside:
            _setting = _tf32()
            if _setting:
                _set_tf32(_setting, allowed=False)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _setting:
                _set_tf32(_setting, allowed=True)


def _tf32() -> str:
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch 2.9 and later: contradictory settings
        legacy = "highest"
    if legacy != "highest":
        return legacy
    return "tf32" if getattr(torch.backends.cuda.matmul, "fp32_precision", "") == "tf32" else ""


def _set_tf32(setting: str, allowed: bool) -> None:
    if setting == "tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    else:
        torch.set_float32_matmul_precision(setting if allowed else "highest")
