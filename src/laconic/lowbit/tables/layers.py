"""Inference layers with weights packed to a table. Each call unpacks alpha * q."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from laconic.lowbit.tables.tables import Table, table_with


class PackedMatrix(nn.Module):
    """Codes uint8 (rows, bytes), scales float32 (rows or 1, 1), table values."""

    codes: Tensor
    alpha: Tensor
    values: Tensor

    def __init__(self, codes: Tensor, alpha: Tensor, values: Tensor, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.register_buffer("codes", codes)
        self.register_buffer("alpha", alpha)
        self.register_buffer("values", values)

    @classmethod
    def of(cls, alpha: Tensor, q: Tensor, table: Table) -> PackedMatrix:
        values = torch.tensor(table.values, dtype=torch.int8, device=q.device)
        return cls(table.pack(q), alpha.clone(), values, q.shape[1])

    @property
    def table(self) -> Table:
        return table_with(tuple(self.values.tolist()))

    def dense(self, rows: Tensor | None = None) -> Tensor:
        codes, alpha = self.codes, self.alpha
        if rows is not None:
            codes, alpha = codes[rows], alpha if len(alpha) == 1 else alpha[rows]
        return alpha * self.table.unpack(codes, self.columns)


class PackedLinear(nn.Module):
    """Linear layer: x (..., columns) float32 to (..., rows)."""

    bias: Tensor | None

    def __init__(self, layer: nn.Linear, matrices: dict[str, PackedMatrix]) -> None:
        super().__init__()
        self.weight = matrices["weight"]
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.dense(), self.bias)


class PackedEmbedding(nn.Module):
    """Embedding: indices (...) to float32 (..., columns)."""

    def __init__(self, layer: nn.Embedding, matrices: dict[str, PackedMatrix]) -> None:
        super().__init__()
        self.weight = matrices["weight"]

    def forward(self, x: Tensor) -> Tensor:
        rows, place = torch.unique(x, return_inverse=True)
        return self.weight.dense(rows)[place]


class PackedRecurrent(nn.Module):
    KINDS: ClassVar[dict[type, str]] = {nn.LSTM: "LSTM", nn.GRU: "GRU"}

    def __init__(self, layer: nn.LSTM | nn.GRU, matrices: dict[str, PackedMatrix]) -> None:
        super().__init__()
        for name, matrix in matrices.items():
            self.add_module(name, matrix)
        for name, each in layer.named_parameters(recurse=False):
            if name not in matrices:
                self.register_buffer(name, each.detach().clone())
        self._matrices = tuple(matrices)
        shape = type(layer)(
            layer.input_size,
            layer.hidden_size,
            layer.num_layers,
            layer.bias,
            layer.batch_first,
            layer.dropout,
            layer.bidirectional,
            device="meta",
        )
        self._shape = (shape,)  # in a tuple it is no submodule

    def forward(self, x: Any, state: Any = None) -> Any:
        weights = {name: self.get_submodule(name).dense() for name in self._matrices}  # type: ignore[operator]
        (shape,) = self._shape
        return functional_call(shape.train(self.training), weights | dict(self._buffers), (x, state))


PACKED: dict[type, type[nn.Module]] = {
    nn.Linear: PackedLinear,
    nn.Embedding: PackedEmbedding,
    nn.LSTM: PackedRecurrent,
    nn.GRU: PackedRecurrent,
}
