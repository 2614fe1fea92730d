"""Smoke test of an installed wheel: native kernels, a codec, and training on every rank that runs this.

Plain `python smoke.py` is one rank; `laconic run smoke.py --nproc-per-node 2` is two.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import codecs, methods
from laconic.kernels import dispatch


def check_installed() -> None:
    """Raise AssertionError unless the wheel is what is imported, with its native kernels."""
    assert Path(laconic.__file__).is_relative_to(sys.prefix), laconic.__file__
    assert (Path(laconic.__file__).parent / "py.typed").exists()
    assert dispatch.native(torch.zeros(1)), "the native kernels are missing"


def check_codec() -> None:
    """Encode and decode a tensor with a typed callable and with its string."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for codec in (codecs.qsgd(levels=127), laconic.parse("qsgd(levels=127)")):
        wire = codec.encode(x, key=7)
        assert wire.numel() == codec.nbytes(1000)
        assert torch.allclose(codec.decode(wire, 1000), x, atol=0.05)


def train() -> None:
    """Train a small model with compressed gradients: the loss falls, and ranks stay equal."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=size)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = laconic.compress(model, optimizer, methods.dgc(density=0.1))
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(100):
        x = torch.randn(32, 64)
        loss = (model(x) - x).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0], (losses[0], losses[-1])
    assert handle.stats().ratio > 1 or size == 1
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    everywhere = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everywhere, weights)
    assert all(torch.equal(weights, other) for other in everywhere)
    dist.destroy_process_group()


if __name__ == "__main__":
    check_installed()
    check_codec()
    train()
    print("the wheel works")
