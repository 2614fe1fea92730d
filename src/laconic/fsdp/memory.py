"""Error feedback for FSDP2's reduce-scatter, in 8 bits: what is left of a gradient goes with the next.

    x_t = decay * e_t + g_t        sent_t = C(x_t)        e_{t+1} = Q(x_t - sent_t)

A rank has all of a module's gradient when it is reduced, and a shard of it afterwards. In float32 the
residual e would be as large as the model on every rank, which sharding is there to avoid: it is kept in 8
bits, as in LoCo (Xie et al. 2024, arXiv:2407.04480). A reconstruction: LoCo's moving average of errors and
its resets are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from laconic.codecs.minmax import MinMax
from laconic.comm.sent import Sent
from laconic.core.errors import StateError

STORE = MinMax(bits=8)  # Q
MOST_SUMS = 10_000  # of sizes of tensors; with more, nobody knows whose the elements are


class ShardMemory:
    """The residuals of the modules of one model on one rank: 1 byte an element, and the scales.

    What Q rounds off is lost, at most 1/510 of a block's range; it is not a residual of its own.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._wires: dict[str, Tensor] = {}
        self._old: dict[str, Tensor | None] = {}  # what the present backward pass has replaced

    def begin(self) -> None:
        """Start a backward pass: the one before counts, also where nothing has settled it."""
        self._old.clear()

    def settle(self) -> None:
        """Free the residuals from before this backward pass: it is decided whether it counts."""
        self._old.clear()

    def put_back(self) -> None:
        """Restore the residuals from before this backward pass: the step is skipped."""
        for name, wire in self._old.items():
            if wire is None:
                del self._wires[name]
            else:
                self._wires[name] = wire
        self._old.clear()

    def add_to_(self, x: Tensor, name: str) -> None:
        """x (n,) += decay * residual of this module, if there is one of as many elements."""
        if (wire := self._wires.get(key(name, x.numel()))) is not None:
            STORE.decode_add_(wire, x, alpha=self.decay)

    def encoded(self, x: Tensor, sent: Sent) -> Tensor:
        """Bytes of the residual: x without the sent share. x is overwritten."""
        return STORE.encode(sent.add_to_(x, -1.0), 0)

    def keep(self, wire: Tensor, n: int, name: str) -> None:
        """Keep the residual of this module, of n elements."""
        self._old.setdefault(key(name, n), self._wires.get(key(name, n)))
        self._wires[key(name, n)] = wire

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank holds."""
        return sum(wire.numel() for wire in self._wires.values())

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals as kept, uint8."""
        return dict(self._wires)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore them. Raises `StateError`, with nothing changed, if they are damaged."""
        for name, wire in state.items():
            n = name.rpartition("/")[2]
            if not n.isdecimal():
                raise StateError(f"{name} is no residual of shards: the saved state is of another handle")
            if wire.dtype != torch.uint8 or wire.numel() != STORE.nbytes(int(n)):
                raise StateError(
                    f"the residual of {name} has {wire.numel()} elements of {wire.dtype}, it must have"
                    f" {STORE.nbytes(int(n))} bytes: the saved state is damaged"
                )
        self._wires = dict(state)
        self._old.clear()


def key(module: str, n: int) -> str:
    """A module's reduce-scatter of n elements: parameters without a gradient are left out of it.

    >>> key("layers.0", 1024)
    'layers.0/1024'
    """
    return f"{module}/{n}"


def is_one_set(n: int, sizes: Iterable[int]) -> bool:
    """Whether n elements tell which of the tensors of these sizes they are of.

    >>> is_one_set(7, [4, 4, 3]), is_one_set(8, [4, 4, 3]), is_one_set(11, [4, 4, 3])
    (False, True, True)
    """
    found = [*sizes]
    left_out = sum(found) - n
    ways = {0: 1}  # to leave out so many elements
    for size in found:
        for total, count in [*ways.items()]:
            if total + size <= left_out:
                ways[total + size] = ways.get(total + size, 0) + count
        if len(ways) > MOST_SUMS:
            return False
    return ways.get(left_out) == 1
