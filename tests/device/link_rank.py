"""One of two ranks that send a tensor over a link, as `python -m tests.device.link_rank RANK FILE`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import laconic
from tests.device import counting, device
from tests.device.worlds import CPU, GPU

LENGTH = 1024  # whole blocks: the stand-in makes no tables in autograd's thread


def sent_and_received(where: torch.device) -> torch.Tensor:
    """Return the gradient on rank 0, and the tensor on rank 1."""
    link = laconic.pipeline.link("minmax(bits=4)")
    if dist.get_rank() == 0:
        x = torch.linspace(-1, 1, LENGTH).to(where).requires_grad_()
        link.send(x, to=1).backward()
        assert x.grad is not None
        return x.grad
    received = link.receive((LENGTH,), source=0, device=where)
    received.pow(2).sum().backward()
    return received.detach()


def main() -> None:
    device.install()
    store = dist.FileStore(sys.argv[2], 2)
    dist.init_process_group(f"cpu:gloo,{device.NAME}:gloo", store=store, rank=int(sys.argv[1]), world_size=2)
    expected = sent_and_received(CPU)
    with counting.counted() as counts:
        found = sent_and_received(GPU)
    assert found.device == GPU
    assert torch.equal(found.cpu(), expected)
    # those of send and receive: nothing is counted in autograd's thread
    lines = [line for (_, _, line), count in counts.waits.items() for _ in range(count)]
    assert [line for line in lines if line.startswith("pipeline/offer")] == []
    assert sum(line.startswith("pipeline/link") for line in lines) == 1, counts.where()
    dist.all_reduce(torch.zeros(1))  # both have ended


if __name__ == "__main__":
    main()
