"""Error feedback for FSDP2's reduce-scatter, with residuals in 8 bits.

    x_t = decay * e_t + g_t        sent_t = C(x_t)        e_{t+1} = Q(x_t - sent_t)

In float32 e would be as large as the model on every rank. 8 bits as in LoCo (Xie et al. 2024,
arXiv:2407.04480): a reconstruction, without its moving average and resets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from laconic.codecs.minmax import MinMax
from laconic.comm.messages import Sent
from laconic.core.errors import StateError

STORE = MinMax(bits=8)  # Q
MAX_SUMS = 10_000  # above it elements count as ambiguous


class ShardMemory:
    """Residuals of one model's modules on one rank: 1 byte per element, and the scales.

    The rounding error of Q, at most 1/510 of a block's range, is lost.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._wires: dict[str, Tensor] = {}
        self._old: dict[str, Tensor | None] = {}

    def begin(self) -> None:
        """Start a backward pass: the previous one is final, even without `settle`."""
        self._old.clear()

    def settle(self) -> None:
        self._old.clear()

    def put_back(self) -> None:
        for name, wire in self._old.items():
            if wire is None:
                del self._wires[name]
            else:
                self._wires[name] = wire
        self._old.clear()

    def add_to_(self, x: Tensor, name: str) -> None:
        if (wire := self._wires.get(key(name, x.numel()))) is not None:
            STORE.decode_add_(wire, x, alpha=self.decay)

    def encoded(self, x: Tensor, sent: Sent) -> Tensor:
        """Return the encoded residual; overwrite x."""
        return STORE.encode(sent.add_to_(x, -1.0), 0)

    def keep(self, wire: Tensor, n: int, name: str) -> None:
        self._old.setdefault(key(name, n), self._wires.get(key(name, n)))
        self._wires[key(name, n)] = wire

    @property
    def nbytes(self) -> int:
        return sum(wire.numel() for wire in self._wires.values())

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._wires)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
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
    """Return the name of a module's reduce-scatter of n elements: it omits parameters without a gradient.

    >>> key("layers.0", 1024)
    'layers.0/1024'
    """
    return f"{module}/{n}"


def identifies_tensors(n: int, sizes: Iterable[int]) -> bool:
    """Return whether exactly one subset of tensors of these sizes has n elements in total.

    >>> identifies_tensors(7, [4, 4, 3]), identifies_tensors(8, [4, 4, 3]), identifies_tensors(11, [4, 4, 3])
    (False, True, True)
    """
    found = [*sizes]
    left_out = sum(found) - n
    ways = {0: 1}
    for size in found:
        for total, count in [*ways.items()]:
            if total + size <= left_out:
                ways[total + size] = ways.get(total + size, 0) + count
        if len(ways) > MAX_SUMS:
            return False
    return ways.get(left_out) == 1
