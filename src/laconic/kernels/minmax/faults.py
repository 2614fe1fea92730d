"""Checks of messages: on a GPU flags, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from laconic.core.deferred import check
from laconic.core.errors import WireError
from laconic.kernels.minmax.rows import Rows
from laconic.kernels.tiles import table

INFINITE = 0x7F800000  # bits of |x| from which x is Inf or NaN
MAGNITUDE = 0x7FFFFFFF
FAULTS = (  # in order of reporting
    "a unit of {} is negative, or a unit or minimum not finite",
    "a range of {} has no finite end",
    "the last bits of {} must be zero",
)


@dataclass(frozen=True)
class Faults:
    """Places of each kind of fault, and the tensor of each place."""

    kinds: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, heads: Tensor, codes: Tensor, rows: Rows, width: int, numbers: tuple[int, ...]) -> Faults:
        """Check heads, as float32 bits, and levels of the tensors `numbers`."""
        unit, low = heads.unbind(dim=1)
        wrong = (unit < 0) | (unit >= INFINITE) | (low & MAGNITUDE >= INFINITE)
        unit, low = heads.view(torch.float32).unbind(dim=1)
        endless = ~(low + unit * float((1 << width) - 1)).isfinite()
        device = heads.device
        owners = table(numbers, device)[rows.owners(device)]
        kinds = [(wrong, owners), (endless, owners)]
        if last := _last_bytes(rows, width, numbers):
            places, used, whose = (table(column, device) for column in last)
            kinds.append((codes[places] >> used != 0, whose))
        return cls(tuple(kinds))


@lru_cache(maxsize=512)
def _last_bytes(rows: Rows, width: int, numbers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the partly used last bytes: position, bits used, tensor."""
    found, at = [], 0
    for n, gap, number in zip(rows.sizes, rows.gap_nbytes(width), numbers, strict=True):
        at += (n * width + 7) // 8
        if n * width % 8:
            found.append((at - 1, n * width % 8, number))
        at += gap
    return tuple(zip(*found, strict=True))


def check_faults(
    faults: Sequence[Faults], lengths: Sequence[int], device: torch.device, numbered: bool
) -> Tensor | None:
    """Raise `WireError` for the first fault of messages of `lengths` tensors; see `core.deferred.check`.

    Returns a flag bool () on a GPU, else None.
    """
    if device.type == "cpu":
        if any(bool(found.any()) for each in faults for found, _ in each.kinds):
            number, kind = min(
                (int(whose[found].min()), kind)
                for each in faults
                for kind, (found, whose) in enumerate(each.kinds)
                if bool(found.any())
            )
            message = 0
            while number >= lengths[message]:
                number -= lengths[message]
                message += 1
            raise fault(message if numbered else None, kind, f"tensor {number}")
        return None
    messages = _message_of(tuple(lengths), device)
    flags = torch.zeros(len(lengths) * len(FAULTS), dtype=torch.int32, device=device)
    for each in faults:
        for kind, (found, whose) in enumerate(each.kinds):
            flags.index_add_(0, messages[whose].mul_(len(FAULTS)).add_(kind), found.to(torch.int32))
    invalid = (flags != 0).any()
    check_flags(flags, numbered)
    return invalid


def check_flags(flags: Tensor, numbered: bool) -> None:
    """Raise `WireError` for the first flag of int32 (messages * kinds,)."""
    kinds = len(FAULTS)
    check(flags, lambda i: fault(i // kinds if numbered else None, i % kinds, "a tensor"))


def fault(message: int | None, kind: int, tensor: str) -> WireError:
    error = WireError(FAULTS[kind].format(tensor))
    error.message = message
    return error


@lru_cache(maxsize=512)
def _message_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return table(tuple(m for m, count in enumerate(lengths) for _ in range(count)), device)
