"""Sparse matrix.

    CSR    values as float32, columns as int32, and the start of each row: 8 bytes per entry
    2:4    two of every four consecutive entries of a row, 2-bit positions: 17 bytes per 8 entries, not 32

Products convert 2:4 (Mishra et al. 2021, arXiv:2104.08378) to dense: it only saves memory.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from laconic import kernels
from laconic.core.errors import StateError

BUFFERS = {"csr": ("rows", "columns", "values"), "2:4": ("places", "values")}


class SparseWeight(nn.Module):
    """Matrix (n, m) as CSR or 2:4. Not trainable."""

    rows: Tensor
    columns: Tensor
    places: Tensor
    values: Tensor

    def __init__(self, weight: Tensor, form: str) -> None:
        super().__init__()
        self.form, self.shape = form, tuple(weight.shape)
        made = _csr(weight) if form == "csr" else _two_of_four(weight)
        for name, tensor in made.items():
            self.register_buffer(name, tensor)

    def matrix(self) -> Tensor:
        return self.csr() if self.form == "csr" else self.dense()

    def csr(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(
                self.rows,
                self.columns,
                self.values,
                self.shape,
                check_invariants=False,
                dtype=self.values.dtype,
                device=self.values.device,
            )

    def dense(self) -> Tensor:
        if self.form == "csr":
            return self.csr().to_dense()
        n, m = self.shape
        whole = self.values.new_zeros(n * m // 4, 4)
        places = kernels.unpack_bits(self.places.cpu(), 2, self.values.numel()).long().view(-1, 2)
        return whole.scatter_(1, places.to(whole.device), self.values.view(-1, 2)).view(n, m)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        names = BUFFERS[self.form]
        saved = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        if len(saved) == len(names):
            wrong = self._find_fault(saved)
            if wrong:
                n, m = self.shape
                raise StateError(
                    f"{prefix}{wrong}, which does not fit a {self.form} weight of {n} x {m}: the file is"
                    " damaged, or of another architecture or form"
                )
            for name, tensor in saved.items():
                setattr(self, name, getattr(self, name).new_empty(tensor.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _find_fault(self, saved: dict[str, Any]) -> str:
        for name, tensor in saved.items():
            own = getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.dtype is not own.dtype or tensor.dim() != 1:
                return f"{name} is not a vector of {own.dtype}"
            if (self.form == "2:4" or name == "rows") and tensor.shape != own.shape:
                return f"{name} has {len(tensor)} elements in place of {len(own)}"
        if self.form == "2:4":
            return ""
        rows, columns, values = saved["rows"], saved["columns"], saved["values"]
        if int(rows[0]) != 0 or bool((rows.diff() < 0).any()) or int(rows[-1]) != len(columns):
            return f"rows do not divide {len(columns)} entries"
        if len(values) != len(columns):
            return f"values are {len(values)} for {len(columns)} columns"
        if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < self.shape[1]:
            return f"columns go from {int(columns.min())} to {int(columns.max())}"
        return ""

    def extra_repr(self) -> str:
        return f"{self.shape[0]} x {self.shape[1]}, {self.form}, {self.values.numel()} entries"


def is_two_of_four(weight: Tensor) -> bool:
    return weight.shape[1] % 4 == 0 and not bool(((weight.reshape(-1, 4) != 0).sum(1) > 2).any())


def smaller_form(weight: Tensor) -> str:
    csr = 8 * int((weight != 0).sum()) + 4 * (len(weight) + 1)
    return "2:4" if is_two_of_four(weight) and 17 * weight.numel() < 8 * csr else "csr"


def _csr(weight: Tensor) -> dict[str, Tensor]:
    used = weight != 0
    rows = torch.cat([used.new_zeros(1, dtype=torch.int32), used.sum(1).cumsum(0).to(torch.int32)])
    return {"rows": rows, "columns": used.nonzero()[:, 1].to(torch.int32), "values": weight[used]}


def _two_of_four(weight: Tensor) -> dict[str, Tensor]:
    fours = weight.reshape(-1, 4)
    places = (fours != 0).to(torch.uint8).topk(2, dim=1).indices.sort(dim=1).values
    codes = kernels.pack_bits(places.flatten().int().cpu(), 2).to(weight.device)
    return {"places": codes, "values": fours.gather(1, places).flatten()}
