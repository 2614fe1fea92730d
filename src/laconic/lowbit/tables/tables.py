"""Tables of weight values: small integers, multiplied by a scale alpha.

Codes are indices into the ascending values: 1 bit per weight for "binary", 1.6 bits for "ternary" (five per
byte), 3 bits for "quinary" and "septenary". Rows are padded to whole bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.errors import StateError

Name = Literal["binary", "ternary", "quinary", "septenary"]


@dataclass(frozen=True)
class Table:
    """Ascending values; `group` codes fill `group_bytes` bytes."""

    values: tuple[int, ...]
    group: int
    group_bytes: int

    @property
    def midpoints(self) -> tuple[float, ...]:
        return tuple((a + b) / 2 for a, b in zip(self.values, self.values[1:], strict=False))

    def row_nbytes(self, columns: int) -> int:
        return -(-columns // self.group) * self.group_bytes

    def pack(self, q: Tensor) -> Tensor:
        """Return codes uint8 of entries int8 (rows, columns)."""
        rows, columns = q.shape
        padded = torch.zeros(rows, -(-columns // self.group) * self.group, dtype=torch.int32, device=q.device)
        if self.group == 5:  # base 3 packs the values directly
            padded[:, :columns] = q
            wire = kernels.pack_ternary(padded.flatten())
        else:
            values = torch.tensor(self.values, dtype=torch.int8, device=q.device)
            padded[:, :columns] = torch.bucketize(q, values).int()
            wire = kernels.pack_bits(padded.flatten(), self.group_bytes)
        return wire.view(rows, self.row_nbytes(columns))

    def unpack(self, wire: Tensor, columns: int) -> Tensor:
        """Return entries int8 (rows, columns). Raise `WireError` for invalid codes."""
        rows, padded = wire.shape[0], -(-columns // self.group) * self.group
        if self.group == 5:
            levels = kernels.unpack_ternary(wire.flatten(), rows * padded).to(torch.int8)
        else:
            codes = kernels.unpack_bits(wire.flatten(), self.group_bytes, rows * padded)
            values = torch.tensor(self.values, dtype=torch.int8, device=wire.device)
            if codes.numel() and int(codes.max()) >= len(self.values):
                raise StateError(
                    f"a packed code is {int(codes.max())}, but its table has {len(self.values)} entries: the"
                    " file is damaged"
                )
            levels = values[codes.long()]
        return levels.view(rows, padded)[:, :columns]


TABLES: dict[str, Table] = {
    "binary": Table((-1, 1), 8, 1),
    "ternary": Table((-1, 0, 1), 5, 1),
    "quinary": Table((-2, -1, 0, 1, 2), 8, 3),
    "septenary": Table((-4, -2, -1, 0, 1, 2, 4), 8, 3),
}


def table_of(name: str) -> Table:
    arguments.choice("table", name, tuple(TABLES))
    return TABLES[name]


def table_with(values: tuple[int, ...]) -> Table:
    for table in TABLES.values():
        if table.values == values:
            return table
    raise StateError(f"no table has the values {values}: the packed model is damaged or of a newer version")
