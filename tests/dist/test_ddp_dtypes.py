"""Parameters of every dtype under `laconic.compress`: exchanged whole, or refused; never in part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError
from tests.dist.nets import batch
from tests.dist.pool import on_ranks
from tests.dist.runs import everywhere

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


class Mixed(nn.Module):
    """A matrix, a vector and a scalar of one dtype, beside a matrix in float32 and one that is never used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(20, 8, generator=rng, dtype=torch.float64).to(dtype))
        self.vector = nn.Parameter(torch.randn(8, generator=rng, dtype=torch.float64).to(dtype))
        self.scalar = nn.Parameter(torch.ones((), dtype=dtype))
        self.plain = nn.Parameter(torch.randn(20, 3, generator=rng))
        self.unused = nn.Parameter(torch.randn(4, 3, generator=rng, dtype=torch.float64).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.matrix.dtype) @ self.matrix * self.scalar + self.vector
        if y.is_complex():
            y = y.real + 2 * y.imag
        return y.float().square().mean() + (x @ self.plain).square().mean()


def reals(model: nn.Module) -> Tensor:
    """All parameters as real numbers, float64."""
    parts = (torch.view_as_real(p) if p.is_complex() else p for p in model.parameters())
    return torch.cat([part.detach().double().flatten() for part in parts])


def trained(spec: str | None, dtype: torch.dtype, rank: int) -> Tensor:
    model = DistributedDataParallel(Mixed(dtype), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = None if spec is None else laconic.compress(model, optimizer, spec)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)[0]).backward()
        optimizer.step()
    if handle is not None:
        handle.load_state_dict(handle.state_dict())
        handle.remove()
    return reals(model)


@on_ranks(
    2, [(spec, dtype) for spec in ("sum()", "topk(0.5)", "cgx(bits=8, min_size=2)") for dtype in DTYPES]
)
def test_each_dtype_is_exchanged_whole(spec: str, dtype: torch.dtype) -> None:
    """Replicas are equal bit for bit; a plain sum is DDP's mean, to the precision of the narrowest."""
    found = trained(spec, dtype, dist.get_rank())
    assert torch.equal(*everywhere(found))
    if spec == "sum()":
        torch.testing.assert_close(found, trained(None, dtype, dist.get_rank()), rtol=2e-2, atol=2e-3)


@on_ranks(2, (("signum()", False), ("cgx()", True)))
def test_who_cannot_exchange_complex_parameters_whole_says_so(spec: str, sharded: bool) -> None:
    """A method that steps the parameters itself, and FSDP2's reduce-scatter."""
    model: nn.Module = DistributedDataParallel(Mixed(torch.complex64), find_unused_parameters=True)
    if sharded:
        plain = Mixed(torch.complex64)
        del plain.scalar  # fully_shard takes none
        model = fully_shard(plain)
    with pytest.raises(AttachError, match=r"(?s)matrix is.*complex.*view_as_real"):
        laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), spec)
