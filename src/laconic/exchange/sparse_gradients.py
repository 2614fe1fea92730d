"""Sparse gradients, as from `Embedding(sparse=True)`: gathered without compression."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.comm.comm import Comm


def sparse_mean(grad: Tensor, comm: Comm) -> Tensor:
    """Return the mean over ranks of sparse COO `grad`: all rows, summed in rank order."""
    grad = grad.coalesce()
    indices, values = grad.indices(), grad.values()
    dims = indices.shape[0]
    all_indices = [flat.view(dims, -1) for flat in comm.all_gather(indices.contiguous().view(-1))]
    all_values = [flat.view(-1, *values.shape[1:]) for flat in comm.all_gather(values.contiguous().view(-1))]
    mean = torch.cat(all_values) / comm.size
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, dim=1),
        mean,
        grad.shape,
        check_invariants=False,
        dtype=mean.dtype,
        device=mean.device,
    )
    return total.coalesce()
