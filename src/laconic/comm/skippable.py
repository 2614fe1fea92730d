"""Collectives of a step that any rank may skip, because its gradient is not finite.

If a rank passes None, every rank returns None. The messages encode the skip:

    gather, all to all    an empty message instead of bytes, one byte instead of an empty message
    sum                   NaN
    max                   infinity
    broadcast             2^62 instead of the length of the message, which is sent first
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.comm.comm import Comm

SKIP_LENGTH = 1 << 62
LARGEST = torch.finfo(torch.float32).max * (1 - 1e-6)  # margin for the rounding of a sum
EXPONENT = 0x7F800000  # bits of float32 infinity


class NonFiniteSum(Exception):
    """Error of a sum that is not finite: every rank skips the step."""


def gather_or_skip(
    comm: Comm,
    message: Tensor | None,
    device: torch.device,
    due: Sequence[bool] | None = None,
    dtype: torch.dtype = torch.uint8,
) -> list[Tensor] | None:
    """Return every rank's message (m_r,), in rank order.

    Args:
        message: this rank's (m,). An empty one that is due is sent as a single zero.
        due: whether each rank has a message; default: all.

    >>> from laconic.comm.loopback import Loopback
    >>> def gather(finite):
    ...     message = torch.arange(2).byte()
    ...     return lambda comm: gather_or_skip(comm, message if finite else None, message.device)
    >>> Loopback.run(1, gather(True)), Loopback.run(1, gather(False))
    ([[tensor([0, 1], dtype=torch.uint8)]], [None])
    """
    empty = torch.empty(0, dtype=dtype, device=device)
    all_due = [True] * comm.size if due is None else due
    messages = comm.all_gather(_filled(message, all_due[comm.rank], empty))
    skip = any(_says_skip(each, its_due) for each, its_due in zip(messages, all_due, strict=True))
    return None if skip else messages


def all_to_all_or_skip(
    comm: Comm, messages: Sequence[Tensor] | None, device: torch.device, due: Sequence[bool] | None = None
) -> list[Tensor] | None:
    """Return the messages uint8 (m_r,) for this rank, in rank order.

    Args:
        messages: one per rank. An empty one that is due is sent as a single zero, except this rank's own.
        due: whether each rank receives messages; default: all.
    """
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    all_due = [True] * comm.size if due is None else due
    own = [None] * comm.size if messages is None else messages
    filled = [_filled(message, its_due, empty) for message, its_due in zip(own, all_due, strict=True)]
    if messages is not None:
        filled[comm.rank] = messages[comm.rank]
    came = comm.all_to_all(filled)
    others = (each for rank, each in enumerate(came) if rank != comm.rank)
    skip = messages is None or any(_says_skip(each, all_due[comm.rank]) for each in others)
    return None if skip else came


def sum_or_skip(
    comm: Comm, x: Tensor | None, n: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """Sum x (n,) over ranks, in place if n > 0; None if x or the sum is not finite."""
    total = comm.all_reduce(_summand(x, n, torch.nan, device, dtype))
    return total[:n] if _is_finite(total) else None


def sum_unchecked(
    comm: Comm, x: Tensor | None, n: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Sum like `sum_or_skip`, for a caller that checks the sum, without waiting for a GPU.

    If n is 0 the sum has one element, which may be NaN.
    """
    return comm.all_reduce(_summand(x, n, torch.nan, device, dtype))


def largest_of(views: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in these (n,), n > 0, as float32 (1,), or float64 (1,) for float64.

    NaN or Inf if an entry is.

    >>> largest_of([torch.tensor([1.0, -2.0]), torch.tensor([]), torch.tensor([0.5])])
    tensor([2.])
    """
    views = [view for view in views if view.numel()]
    x = views[0] if len(views) == 1 else torch.stack(torch._foreach_norm(views, math.inf))
    wide = torch.promote_types(x.dtype, torch.float32)
    most: Tensor = torch.linalg.vector_norm(x, math.inf, dim=0, keepdim=True, dtype=wide)
    return most


def not_finite(*views: Tensor) -> Tensor:
    """Return int32 (1,) for `deferred.check`, not 0 if one of these is not finite."""
    bits = largest_of(views).to(torch.float32).view(torch.int32)  # a magnitude has no sign bit
    flag: Tensor = torch.div(bits, EXPONENT, rounding_mode="floor")
    return flag


def max_or_skip(comm: Comm, x: Tensor | None, n: int, device: torch.device) -> Tensor | None:
    """Return the maximum over ranks of x float32 (n,), in place if n > 0; None if x is not finite."""
    if x is not None and not x.is_cpu:  # do not read the GPU before sending
        x.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    elif x is not None and not bool(x.isfinite().all()):
        x = None  # a NaN could get lost in the maximum
    largest = comm.all_reduce(_summand(x, n, torch.inf, device, torch.float32), "max")
    return largest[:n] if _is_finite(largest) else None


def largest_or_skip(comm: Comm, x: Tensor | None, n: int, device: torch.device) -> Tensor | None:
    """Return `max_or_skip` of x float32 (n,) >= 0; the host reads one number.

    The bits of such floats are ordered like the floats, with NaN last.
    """
    bits = None if x is None else x.view(torch.int32)
    largest = comm.all_reduce(_summand(bits, n, EXPONENT, device, torch.int32), "max")
    return largest[:n].view(torch.float32) if int(largest.max()) < EXPONENT else None


def any_skips(comm: Comm, finite: bool, device: torch.device) -> bool:
    """Return whether a rank is not `finite`. Wire: 4 bytes."""
    return (
        max_or_skip(comm, torch.zeros(1, device=device, dtype=torch.float32) if finite else None, 1, device)
        is None
    )


def broadcast_or_skip(comm: Comm, root: int, message: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the root's message uint8 (m,); on other ranks `message` only says whether x is finite.

    Wire: the length, 8 bytes per rank, then a broadcast.

    >>> from laconic.comm.loopback import Loopback
    >>> def body(comm):
    ...     return broadcast_or_skip(comm, 1, torch.arange(comm.rank * 3).byte(), torch.device("cpu"))
    >>> [message.tolist() for message in Loopback.run(2, body)]
    [[0, 1, 2], [0, 1, 2]]
    """
    mine = comm.rank == root
    nbytes = SKIP_LENGTH if message is None else message.numel() * mine
    longest = int(comm.all_reduce(torch.tensor([nbytes], dtype=torch.int64, device=device), "max"))
    if message is None or longest == SKIP_LENGTH:
        return None
    return comm.broadcast(message if mine else message.new_empty(longest), root)


def fits(x: Sequence[Tensor], alpha: float) -> bool:
    """Return whether alpha times each of these finite (n,) on the CPU stays below float32's largest.

    >>> fits([torch.tensor([1e30])], 1e8), fits([torch.tensor([-1e30])], 1e9), fits([], 1.0)
    (True, False, True)
    """
    views = [view for view in x if view.numel()]
    return not views or float(largest_of(views)) * abs(alpha) < LARGEST


def _is_finite(x: Tensor) -> bool:
    if x.is_cpu or not x.is_floating_point():
        return bool(x.isfinite().all())
    return math.isfinite(largest_of([x]).item())


def _filled(message: Tensor | None, due: bool, empty: Tensor) -> Tensor:
    if message is None:
        return empty if due else empty.new_zeros(1)
    return message if message.numel() or not due else empty.new_zeros(1)


def _says_skip(message: Tensor, due: bool) -> bool:
    return (message.numel() == 0) == due


def _summand(x: Tensor | None, n: int, skip: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    if x is None:
        return torch.full((max(1, n),), skip, dtype=dtype, device=device)
    return x if n else torch.zeros(1, dtype=dtype, device=device)
